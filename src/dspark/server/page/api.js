// Talking to the server that this page came from.

let apiKey = sessionStorage.getItem("api key") ?? "";

export function setKey(key) {
  apiKey = key.trim();
  sessionStorage.setItem("api key", apiKey);
}

function headers() {
  return apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
}

/** The JSON at `path`; throws an Error with the server's message and `status`. */
export async function getJson(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Calls `onChunk` with every chunk of a streamed chat completion. */
export async function streamChat(body, onChunk, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const events = waiting.split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      onChunk(chunk);
    }
  }
}

async function failure(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of our errors: the status says what there is to say
  }
  return Object.assign(new Error(message), { status: response.status });
}
