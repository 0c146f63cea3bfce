// Small helpers. Text from the service only ever becomes a text node: markup in it is shown, not run.

/** Make an element: h("a", {href, onclick, "aria-label": text}, "text", child, [more]). */
export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(9).filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

/** A sentence's parts; what stands between backticks becomes code. */
export const coded = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));

/** Ask the console; errors carry its sentence, and `status`. */
export async function ask(path, options = {}) {
  const answer = await fetch(path, options);
  if (answer.status === 401 && !path.endsWith("/login")) window.dispatchEvent(new Event("logged-out"));
  const body = await answer.json().catch(() => ({ error: answer.statusText }));
  if (!answer.ok) throw Object.assign(new Error(body.error || answer.statusText), { status: answer.status });
  return body;
}

export const post = (path, body) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

export const bufferPath = (buffer) => `/api/buffers/${encodeURIComponent(buffer)}`;

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return (value + 0).toLocaleString("en"); // Not "-0".
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(digits)).toString();
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${number(value)} ${units[at]}`;
}

export function ago(seconds) {
  if (seconds < 1.5) return "just now";
  if (seconds < 120) return `${Math.round(seconds)} s ago`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

export const versions = (each) => (each.version_min === each.version_max ? `version ${each.version_min}` : `versions ${each.version_min} to ${each.version_max}`);

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

/** A table of rows; cells may be text or elements. Headings are text or elements, and those of numbers begin with "#". */
export function table(caption, headings, rows, empty = "none") {
  if (!rows.length) return h("p", { class: "empty" }, `${caption}: ${empty}`);
  const isNumber = headings.map((each) => each[0]?.[0] === "#");
  const title = (each) => each.replace?.(/^#/, "") ?? (Array.isArray(each) ? each[1] : each);
  const labels = headings.map((each) => title(each).textContent ?? title(each));
  const cell = (value, at) => h("td", { class: isNumber[at] ? "number" : null, "data-label": labels[at] }, value ?? "–");
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, headings.map((each, at) =>
        h("th", { scope: "col", class: isNumber[at] ? "number" : null }, title(each))))),
      h("tbody", {}, rows.map((row) => h("tr", { class: row.level }, (row.cells || row).map(cell))))));
}
