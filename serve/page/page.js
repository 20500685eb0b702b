// The page: writing, chatting and comparing. It knows the API and nothing else of the server.
import { $, ask, make } from "/page/api.js";
import { showRun } from "/page/run.js";

// Events of a stream; one that ends without [DONE] was cut off, and that is an error.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer was cut off");
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function settings() {
  const found = {
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    max_tokens: Number($("max_tokens").value),
  };
  if ($("seed").value !== "") found.seed = Number($("seed").value);
  if ($("stop").value !== "") found.stop = $("stop").value;
  return found;
}

function say(form, text, isBad = false) {
  const note = form.querySelector(".note");
  note.textContent = text;
  note.classList.toggle("bad", isBad);
}

// Runs one request of a form: its buttons, its errors, its stop.
async function work(form, body) {
  const [go, stop] = [form.querySelector(".go"), form.querySelector(".stop")];
  const control = new AbortController();
  stop.onclick = () => control.abort();
  go.disabled = true;
  stop.disabled = false;
  say(form, "reading the shards …");
  try {
    await body(control.signal);
  } catch (error) {
    if (error.name === "AbortError") say(form, "stopped");
    else say(form, error.message, true);
  } finally {
    go.disabled = false;
    stop.disabled = true;
  }
}

// Streams one answer: `put` gets each piece of text.
async function stream(form, path, body, signal, pieceOf, put) {
  const began = performance.now();
  let first = null;
  let last = {};
  let usage = null;
  let finish = "";
  const wanted = { ...body, stream: true, stream_options: { include_usage: true } };
  for await (const event of events(await ask(path, wanted, signal))) {
    last = event;
    usage = event.usage ?? usage;
    const choice = event.choices[0];
    finish = choice?.finish_reason ?? finish;
    const text = choice ? pieceOf(choice) : "";
    if (text) {
      first ??= performance.now() - began;
      put(text);
    }
  }
  const seconds = (performance.now() - began) / 1000;
  const commit = (last.system_fingerprint ?? "").slice(0, 12);
  const rate = usage ? `${usage.completion_tokens} tokens, ${(usage.completion_tokens / seconds).toFixed(1)} a second` : "";
  say(form, `${finish} · ${rate} · first after ${((first ?? 0) / 1000).toFixed(2)} s · commit ${commit}`);
}

$("write-form").onsubmit = (event) => {
  event.preventDefault();
  const prompt = $("prompt").value;
  const place = $("written");
  place.replaceChildren(make("span", prompt, { class: "given" }));
  const body = { model: $("model").value, prompt, ...settings() };
  work(event.target, (signal) =>
    stream(event.target, "/v1/completions", body, signal, (choice) => choice.text, (text) => place.append(text)));
};

let messages = [];
$("chat-form").onsubmit = (event) => {
  event.preventDefault();
  const content = $("message").value;
  if (!content) return;
  $("message").value = "";
  messages.push({ role: "user", content });
  $("talk").append(make("p", content, { class: "said user" }));
  const bubble = make("p", "", { class: "said" });
  $("talk").append(bubble);
  const body = { model: $("model").value, messages, ...settings() };
  work(event.target, (signal) =>
    stream(event.target, "/v1/chat/completions", body, signal, (choice) => choice.delta.content, (text) => {
      bubble.append(text);
      $("talk").scrollTop = $("talk").scrollHeight;
    })).then(() => messages.push({ role: "assistant", content: bubble.textContent }));
};
$("forget").onclick = () => {
  messages = [];
  $("talk").replaceChildren();
};
$("message").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("chat-form").requestSubmit();
  }
};

$("compare-form").onsubmit = (event) => {
  event.preventDefault();
  const prompt = $("both").value;
  const body = { prompt, models: [$("first").value, $("second").value], ...settings() };
  work(event.target, async (signal) => {
    showComparison(await (await ask("/compare", body, signal)).json());
    say(event.target, "");
  });
};

function showComparison(found) {
  const texts = found.results.map((result) => result.text);
  let same = 0;
  while (same < Math.min(texts[0].length, texts[1].length) && texts[0][same] === texts[1][same]) same += 1;
  found.results.forEach((result, index) => {
    const text = make("div");
    text.append(make("span", result.text.slice(0, same), { class: "given" }), make("mark", result.text.slice(same)));
    const mean = result.mean_logprob === null ? "none" : result.mean_logprob.toFixed(3);
    $(`side-${index}`).replaceChildren(
      make("h2", `${result.model} · step ${result.step}`), text,
      make("small", `${result.finish_reason} · ${result.tokens.length} tokens · mean log-probability ${mean} · commit ${result.commit.slice(0, 12)}`));
  });
  const parted = found.first_difference;
  const difference = found.logprob_difference;
  $("verdict").hidden = false;
  $("verdict").textContent = [
    parted ? `The first token that differs is number ${parted.index + 1}: ${quoted(parted.sides[0])} and ${quoted(parted.sides[1])}.` : "Both say the same.",
    difference === null ? "" : `Before it the second is surer by ${difference.toFixed(3)} a token.`,
    `${found.shared_shards} of ${found.shards} shards are the same.`,
  ].join(" ");
}

const quoted = (side) => (side ? JSON.stringify(side.token) : "the end");

async function showState() {
  try {
    const health = await (await ask("/health")).json();
    const { step, store, branch } = health.models.primary;
    $("state").className = "state good";
    $("state").textContent = `${store} · ${branch} · step ${step}`;
  } catch (error) {
    $("state").className = "state bad";
    $("state").textContent = error.message;
  }
}

async function fillModels() {
  try {
    const listed = await (await ask("/v1/models")).json();
    $("models").replaceChildren(...listed.data.map((row) => make("option", `step ${row.step}`, { value: row.id })));
    const second = listed.data.find((row) => row.id === "backup") ?? listed.data.at(-1);
    if (!listed.data.some((row) => row.id === $("second").value)) $("second").value = second.id;
  } catch (error) {
    say($("write-form"), error.message, true);
  }
}

function showTab(name) {
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-selected", String(button.dataset.tab === name));
    $(`tab-${button.dataset.tab}`).hidden = button.dataset.tab !== name;
  }
  $("settings").hidden = name === "run";
  $("model-label").hidden = name === "compare";
  for (const label of document.querySelectorAll(".pair")) label.hidden = name !== "compare";
  if (name === "run") showRun();
}

for (const button of document.querySelectorAll("nav button")) button.onclick = () => showTab(button.dataset.tab);
document.addEventListener("try", (event) => {
  $("model").value = event.detail;
  showTab("write");
});
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  $("key-form").hidden = true;
  fillModels();
  showState();
};
fillModels();
showState();
setInterval(() => {
  if (document.hidden) return;
  showState();
  if (!$("tab-run").hidden) showRun();
}, 3000);
if (["write", "chat", "compare", "run"].includes(location.hash.slice(1))) showTab(location.hash.slice(1));
