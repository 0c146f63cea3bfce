// Login, pages by the address's hash, and the one stream of news.
import { ask, coded, h, post } from "./dom.js";
import { showEpisodes } from "./episodes.js";
import { showLearning } from "./learning.js";
import { showOverview } from "./overview.js";
import { showEpisode } from "./viewer.js";

const main = document.querySelector("main"), state = document.querySelector("#state");
const nav = document.querySelector("nav"), choice = document.querySelector("#buffer");
const logout = document.querySelector("#logout");
const PAGES = { overview: showOverview, episodes: showEpisodes, learning: showLearning, episode: showEpisode };
const app = { latest: null, buffer: null, page: null };
let news = null;

/** The address's parts: "#/episodes/default?task=x" is page, path and query. */
export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [page = "", ...rest] = path.split("/").map(decodeURIComponent);
  return { page: PAGES[page] ? page : "overview", path: rest, query: new URLSearchParams(query) };
}

function show() {
  if (!app.latest && news === null) return;
  const at = place();
  if (at.path[0] && at.path[0] !== app.buffer) app.buffer = at.path[0];
  app.page?.end?.();
  app.page = null;
  main.replaceChildren();
  document.title = `${at.page[0].toUpperCase()}${at.page.slice(1)} – Breadbox console`;
  for (const link of nav.children) {
    const isHere = link.dataset.page === at.page || (at.page === "episode" && link.dataset.page === "episodes");
    if (isHere) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  app.page = PAGES[at.page](main, app, at) ?? {};
  if (app.latest) app.page.update?.(app.latest);
}

function take(overview) {
  const isFirst = app.latest === null;
  app.latest = overview;
  const names = overview.buffers.map((each) => each.name).sort();
  if ([...choice.options].map((each) => each.value).join("\n") !== names.join("\n")) {
    choice.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  }
  if (!names.includes(app.buffer) && names.length) app.buffer = overview.buffers[0].name;
  choice.value = app.buffer ?? "";
  state.textContent = overview.problem ? `Cannot ask ${overview.server.address}: ${overview.problem}` : `Live from ${overview.server.address}`;
  state.className = overview.problem ? "bad" : "good";
  if (isFirst) show(); else app.page?.update?.(overview);
}

function listen() {
  news?.close();
  news = new EventSource("/api/overview");
  news.onmessage = (event) => take(JSON.parse(event.data));
  news.onerror = () => {
    state.textContent = "The console does not answer; trying again";
    state.className = "bad";
    if (news.readyState === EventSource.CLOSED) begin();
  };
  nav.hidden = choice.parentElement.hidden = false;
}

function askForToken(problem = "") {
  news?.close();
  app.latest = null;
  app.page?.end?.();
  nav.hidden = choice.parentElement.hidden = logout.hidden = true;
  state.textContent = "Not logged in";
  state.className = "";
  const token = h("input", { id: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false" });
  const said = h("p", { class: "bad", role: "alert" }, problem);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await post("/api/login", { token: token.value });
      begin();
    } catch (error) { said.textContent = error.message; token.focus(); }
  };
  main.replaceChildren(h("form", { class: "login", onsubmit: submit }, h("h2", {}, "Log in"),
    h("p", {}, "The server asks for a token. You see the buffers that the token may see."),
    h("p", { class: "hint" }, coded("In the local cluster of Docker Compose `make env` prints one for this login. Elsewhere the server's operator makes one: `breadbox token --role viewer --name NAME --file FILE`, where FILE is the file of the server's `--tokens`.")),
    h("label", { for: "token" }, "Token"), token, h("button", { type: "submit" }, "Log in"), said));
  token.focus();
}

let isBeginning = false;
async function begin() {
  if (isBeginning) return;
  isBeginning = true;
  try {
    const session = await ask("/api/session");
    if (session.problem) throw new Error(session.problem);
    logout.hidden = session.is_open || !session.is_in;
    if (session.is_in) listen(); else askForToken();
  } catch (error) {
    state.textContent = `Cannot begin yet: ${error.message}`;
    state.className = "bad";
    setTimeout(begin, 2000);
  } finally { isBeginning = false; }
}

choice.addEventListener("change", () => {
  app.buffer = choice.value;
  const at = place();
  const page = at.page === "episode" ? "episodes" : at.page;
  location.hash = `#/${page}/${encodeURIComponent(app.buffer)}`;
});
logout.addEventListener("click", async () => { await post("/api/logout", {}); askForToken(); });
window.addEventListener("logged-out", () => askForToken("The login has expired."));
window.addEventListener("hashchange", () => { if (location.hash.startsWith("#/")) show(); });
begin();
