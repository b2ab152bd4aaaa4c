// One prompt, one answer, every token coloured by how it came about.

import { streamChat } from "./api.js";

const FATES = {
  accepted: "drafted and accepted",
  corrected: "the target's, in place of a rejected draft",
  bonus: "the target's, after a whole accepted draft",
  plain: "decoded without a draft",
};
const $ = (id) => document.getElementById(id);

let tokens = []; // of the answer shown, one a span
let current = -1;
let running = null;

export function startPlayground() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("output").addEventListener("mouseover", (event) => {
    if (event.target.dataset.index) show(Number(event.target.dataset.index));
  });
  $("output").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || tokens.length === 0) return;
    event.preventDefault();
    show(Math.min(tokens.length - 1, Math.max(0, current + step)));
    $("output").children[current].scrollIntoView({ block: "nearest" });
  });
}

async function generate() {
  if (running) return;
  running = new AbortController();
  tokens = [];
  current = -1;
  $("output").replaceChildren();
  $("details").replaceChildren();
  setBusy(true);
  say("Waiting for the first token …");
  const started = performance.now();
  let first = null;
  let ended = "";
  try {
    await streamChat(
      requestBody(),
      (chunk) => {
        const choice = chunk.choices[0];
        if (!choice) return;
        if (choice.dspark) {
          first ??= performance.now();
          choice.dspark.tokens.forEach(append);
        }
        ended = choice.finish_reason ?? ended;
      },
      running.signal,
    );
    say(summary(started, first, ended));
  } catch (error) {
    if (error.name === "AbortError") say(`Stopped. ${summary(started, first, "stopped")}`);
    else say(error.message, true);
  }
  running = null;
  setBusy(false);
}

function requestBody() {
  const body = {
    messages: [{ role: "user", content: $("prompt").value }],
    temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value),
    speculation: $("speculation").value,
    token_details: true,
    logprobs: true, // for the probabilities of the details
  };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  return body;
}

function append(token) {
  const span = document.createElement("span");
  span.className = `token ${token.fate}`;
  span.dataset.index = tokens.length;
  span.textContent = token.text;
  const output = $("output");
  const following = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  output.append(span);
  if (following) output.scrollTop = output.scrollHeight;
  tokens.push(token);
}

function show(index) {
  const output = $("output");
  output.children[current]?.classList.remove("current");
  current = index;
  output.children[current].classList.add("current");
  const token = tokens[index];
  const rows = [
    ["Token", JSON.stringify(token.text)],
    ["Fate", FATES[token.fate]],
    ["Id", token.id],
    ["Round", token.round],
    ["Position in the block", token.position],
    ["Target probability", percent(token.target_prob)],
    ["Draft probability, as drawn", percent(token.draft_prob)],
    ["Confidence", percent(token.confidence)],
    ["Survival", percent(token.survival)],
  ].filter(([, value]) => value !== undefined && value !== null);
  $("details").replaceChildren(...rows.map(([name, value]) => pair(name, value)));
}

export function pair(name, value) {
  const row = document.createElement("div");
  const term = document.createElement("dt");
  const detail = document.createElement("dd");
  term.textContent = name;
  detail.textContent = value;
  row.append(term, detail);
  return row;
}

function percent(value) {
  return value === undefined || value === null ? undefined : `${(100 * value).toPrecision(3)} %`;
}

function summary(started, first, ended) {
  if (first === null) return "";
  const seconds = (performance.now() - first) / 1000;
  // The first token is prefill's; a round is one pass of the target after it.
  const rounds = new Set(tokens.slice(1).map((token) => token.round)).size;
  const parts = [`${tokens.length} tokens`, `first after ${Math.round(first - started)} ms`];
  if (tokens.length > 1) parts.push(`then ${((tokens.length - 1) / seconds).toFixed(1)} a second`);
  if (rounds) parts.push(`${((tokens.length - 1) / rounds).toFixed(2)} a round`);
  return `${parts.join(", ")}${ended ? ` (${ended})` : ""}.`;
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", isError);
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  $("output").setAttribute("aria-busy", busy);
}
