// What every part of the page uses: elements, and the way to the server.

export const $ = (id) => document.getElementById(id);

export function make(name, text, attributes = {}) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

export async function ask(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const key = sessionStorage.getItem("key");
  if (key) headers.authorization = `Bearer ${key}`;
  const options = { headers, signal };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const answer = await fetch(path, options);
  if (answer.status === 401) $("key-form").hidden = false;
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Error(told?.error?.message ?? `the server answered ${answer.status}`);
  }
  return answer;
}
