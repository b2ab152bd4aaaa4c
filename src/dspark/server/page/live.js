// Asks the server once a second how it is doing, and draws the answer.

import { getJson } from "./api.js";
import { barChart, lineChart, scatter, stackedBars } from "./charts.js";
import { pair } from "./playground.js";

const PHASES = ["draft", "draft_head", "schedule", "verify", "sample", "commit"];
const PHASE_NAMES = {
  draft: "draft", draft_head: "head", schedule: "plan", verify: "verify", sample: "accept", commit: "keep",
};
const RECENT = 10; // seconds that "now" means
const $ = (id) => document.getElementById(id);

let paused = false;

export function startLive() {
  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", paused);
    $("pause").textContent = paused ? "Go on" : "Pause";
  });
  loop();
}

async function loop() {
  for (;;) {
    if (!paused && !document.hidden) {
      try {
        draw(await getJson("stats"));
        $("key-field").hidden = true;
      } catch (error) {
        $("about").textContent = error.message;
        if (error.status === 401) $("key-field").hidden = false;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function draw(stats) {
  const seconds = stats.seconds.map((row) =>
    Object.fromEntries(stats.columns.map((name, index) => [name, row[index]])),
  );
  const now = Math.floor(stats.now);
  // The running second is not whole yet.
  const whole = seconds.filter((second) => second.second < now);
  const recent = whole.filter((second) => second.second >= now - RECENT);
  about(stats.server);
  numbers(stats, recent);
  throughput(whole, now);
  lengths(stats);
  positions(stats.positions);
  timeline(stats.steps);
  budget(whole);
  pareto(whole);
  cost(stats.steps);
  reliability(stats.reliability);
}

function about(server) {
  const drafter = server.drafter ? `drafter ${server.drafter}` : "no drafter";
  $("about").textContent =
    `${server.model} · ${drafter} · policy ${server.policy} · ${server.weights} weights · dspark ${server.version}`;
}

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);
const ratio = (top, bottom, digits = 2) => (bottom ? (top / bottom).toFixed(digits) : "–");

function numbers(stats, recent) {
  const engine = stats.engine;
  const rows = [
    ["Tokens a second", ratio(sum(recent, "emitted"), RECENT, 1)],
    ["Running", engine.running],
    ["Waiting", engine.waiting],
    ["Accepted length", ratio(sum(recent, "accepted") + sum(recent, "rounds"), sum(recent, "rounds"))],
    ["Accepted / verified", ratio(sum(recent, "accepted"), sum(recent, "verified"))],
    ["Budget a round", ratio(sum(recent, "verified") + sum(recent, "rounds"), sum(recent, "rounds"))],
    ["Pages in use", `${engine.pages - engine.pages_free} / ${engine.pages}`],
  ];
  $("numbers").replaceChildren(...rows.map(([name, value]) => pair(name, value)));
}

function throughput(seconds, now) {
  const bySecond = new Map(seconds.map((second) => [second.second, second.emitted]));
  const span = Math.min(now, 120);
  const points = [];
  for (let ago = span; ago >= 1; ago--) points.push([-ago, bySecond.get(now - ago) ?? 0]);
  const last = points.at(-1)?.[1] ?? 0;
  lineChart($("throughput"), points.length ? points : [[0, 0]], {
    xLabel: "seconds ago", yLabel: "tokens/s",
    summary: `${last} tokens in the last second, ${Math.max(0, ...points.map((p) => p[1]))} at most.`,
  });
}

function lengths(stats) {
  const total = stats.lengths.reduce((a, b) => a + b, 0);
  const mean = stats.lengths.reduce((a, count, accepted) => a + count * (accepted + 1), 0) / (total || 1);
  barChart(
    $("lengths"),
    stats.lengths.map((count, accepted) => ({
      label: accepted + 1,
      value: count / total,
      title: `${accepted + 1} tokens: ${count} of ${total} rounds`,
    })),
    {
      xLabel: "accepted draft tokens + 1", yLabel: "share of rounds",
      summary: total ? `${mean.toFixed(2)} on average, over ${total} rounds with a draft.` : "No drafted round yet.",
    },
  );
}

function positions(rows) {
  barChart(
    $("positions"),
    rows.map((row, index) => ({
      label: index + 1,
      value: row.offered ? row.accepted / row.offered : 0,
      title: `position ${index + 1}: ${row.accepted} of ${row.offered} accepted`,
    })),
    {
      xLabel: "position in the block", yLabel: "accepted, if all before were", yMax: 1,
      summary: rows.length
        ? rows.map((row) => ratio(row.accepted, row.offered)).join(", ")
        : "No drafted round yet.",
    },
  );
}

function timeline(steps) {
  const shown = steps.slice(-48);
  const total = (step) => PHASES.reduce((time, phase) => time + (step.seconds[phase] ?? 0), 0);
  const mean = shown.reduce((time, step) => time + total(step), 0) / (shown.length || 1);
  stackedBars(
    $("timeline"),
    shown.map((step) => ({
      title:
        `step ${step.step}: ${step.batch} rows, ${step.rounds} requests, ${step.emitted} tokens out\n` +
        PHASES.map((phase) => `${PHASE_NAMES[phase]} ${(1000 * (step.seconds[phase] ?? 0)).toFixed(1)} ms`).join("\n"),
      parts: Object.fromEntries(PHASES.map((phase) => [phase, 1000 * (step.seconds[phase] ?? 0)])),
    })),
    PHASES,
    {
      xLabel: "", yLabel: "milliseconds", slots: 48, names: PHASE_NAMES,
      summary: shown.length ? `${(1000 * mean).toFixed(0)} ms a step, the last ${shown.length}.` : "No step yet.",
    },
  );
}

const decoding = (seconds) => seconds.filter((second) => second.rounds && second.steps);

function budget(seconds) {
  const points = decoding(seconds).map((second) => ({
    x: second.rounds / second.steps,
    y: 1 + second.verified / second.rounds,
    title: `${(second.rounds / second.steps).toFixed(1)} requests, budget ${(1 + second.verified / second.rounds).toFixed(2)}`,
  }));
  scatter($("budget"), points, {
    xLabel: "decoding requests", yLabel: "1 + verified a round",
    summary: points.length ? `Now ${points.at(-1).y.toFixed(2)} at ${points.at(-1).x.toFixed(1)} requests.` : "No round yet.",
  });
}

function pareto(seconds) {
  const points = decoding(seconds).map((second) => {
    const perUser = second.emitted / (second.rounds / second.steps);
    return {
      x: perUser,
      y: second.emitted,
      title: `${perUser.toFixed(1)} tokens/s a user, ${second.emitted} in all`,
    };
  });
  scatter($("pareto"), points, {
    xLabel: "tokens/s of one user", yLabel: "tokens/s of all",
    summary: points.length ? `Now ${points.at(-1).title}.` : "No round yet.",
  });
}

function cost(steps) {
  const points = steps.map((step) => {
    const time = PHASES.reduce((total, phase) => total + (step.seconds[phase] ?? 0), 0);
    return {
      x: step.batch, y: time > 0 ? 1 / time : 0,
      title: `${step.batch} rows: ${(1000 * time).toFixed(1)} ms`,
    };
  });
  scatter($("cost"), points, {
    xLabel: "tokens in the batch", yLabel: "steps/s",
    summary: points.length ? `The last step: ${points.at(-1).title}.` : "No step yet.",
  });
}

function reliability(bins) {
  const total = bins.reduce((count, bin) => count + bin.count, 0);
  const error = bins.reduce((gap, bin) => gap + bin.count * Math.abs(bin.confidence - bin.accepted), 0) / (total || 1);
  scatter(
    $("reliability"),
    bins.map((bin) => ({
      x: bin.confidence, y: bin.accepted, size: 2 + 6 * Math.sqrt(bin.count / total),
      title: `confidence ${bin.confidence.toFixed(2)}, accepted ${bin.accepted.toFixed(2)}, ${bin.count} tokens`,
    })),
    {
      xLabel: "confidence", yLabel: "accepted", xMax: 1, yMax: 1, diagonal: true, markLast: false,
      summary: total
        ? `Calibration error ${(100 * error).toFixed(1)} % over ${total} tokens.`
        : "No confidence yet.",
    },
  );
}
