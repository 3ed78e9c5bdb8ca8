// The panel in the front end: three parts of HTML that the kernel draws, of which it tells what changes, and two
// buttons. Draws nothing while nobody can see it.

const PARTS = ["head", "devices", "measured"];
const CONFIRM_SECONDS = 5;

/** What Jupyter's own front ends say of their server; null elsewhere. */
function serverSettings() {
  const element = document.getElementById("jupyter-config-data");
  if (element === null) return null;
  const { baseUrl, token } = JSON.parse(element.textContent);
  return baseUrl ? { baseUrl, token } : null;
}

function serverHeaders(token) {
  const headers = token ? { Authorization: `token ${token}` } : {};
  const cookie = document.cookie.match(/(?:^|; )_xsrf=([^;]*)/);
  return cookie === null ? headers : { ...headers, "X-XSRFToken": decodeURIComponent(cookie[1]) };
}

/** Press the notebook's stop button, which works whatever the kernel does; say whether that was possible. */
async function interruptKernel(kernelId) {
  const server = serverSettings();
  if (server === null || !kernelId) return false;
  const url = `${server.baseUrl}api/kernels/${encodeURIComponent(kernelId)}/interrupt`;
  try {
    return (await fetch(url, { method: "POST", headers: serverHeaders(server.token) })).ok;
  } catch {
    return false;
  }
}

/** A cell that blocks the kernel is ended by its stop button; all else the kernel does when it hears of it. */
async function act(model, kind, said) {
  const run = model.get("run");
  const ended = model.get("blocking") && (await interruptKernel(model.get("kernel_id")));
  if (kind === "stop" || !ended) model.send({ kind, run });
  said.textContent = model.get("blocking") && !ended ? "Asked. The kernel answers when its cell ends." : "Asked.";
}

function button(label, press) {
  const element = document.createElement("button");
  element.type = "button";
  element.textContent = label;
  element.addEventListener("click", () => press(element));
  return element;
}

/** A button that must be pressed twice. */
function carefulButton(label, confirmation, press) {
  let timer = 0;
  const calm = (element) => {
    clearTimeout(timer);
    timer = 0;
    element.textContent = label;
  };
  return button(label, (element) => {
    if (timer) {
      calm(element);
      press();
      return;
    }
    element.textContent = confirmation;
    timer = setTimeout(calm, CONFIRM_SECONDS * 1000, element);
  });
}

function buttonRow(model) {
  const row = document.createElement("div");
  row.className = "oc-buttons";
  const said = document.createElement("span");
  said.setAttribute("role", "status");
  const interrupt = button("Interrupt the cell", () => act(model, "interrupt", said));
  const stop = carefulButton("Stop the cluster", "Really stop? The workers' variables are lost", () =>
    act(model, "stop", said),
  );
  row.append(interrupt, stop, said);
  const update = () => {
    said.textContent = "";
    row.hidden = model.get("run") === "";
  };
  update();
  return { row, update };
}

/** Make a node like another where they differ: the rest is not painted again, and keeps its focus and scroll. */
function patch(node, wanted) {
  if (node.nodeName !== wanted.nodeName) {
    node.replaceWith(wanted);
  } else if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== wanted.data) node.data = wanted.data;
  } else {
    patchAttributes(node, wanted);
    patchChildren(node, wanted);
  }
}

function patchAttributes(node, wanted) {
  for (const { name } of [...node.attributes]) {
    if (!wanted.hasAttribute(name)) node.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
}

function patchChildren(node, wanted) {
  const before = [...node.childNodes];
  const after = [...wanted.childNodes];
  after.forEach((child, place) => (place < before.length ? patch(before[place], child) : node.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
}

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

/** Tags and the text between them: every `<`, `>` and `"` within a value is escaped where the HTML is drawn. */
function tokens(html) {
  return html.match(/<[^>]*>|[^<]+/g) ?? [];
}

function unescaped(text) {
  return text.includes("&") ? parsed(text).textContent : text;
}

/** Pairs of name and value in a tag. */
function attributes(tag) {
  return [...tag.matchAll(/([^\s"=]+)="([^"]*)"/g)].map(([, name, value]) => [name, value]);
}

function retouch(node, token, last) {
  if (node.nodeType === Node.TEXT_NODE) {
    node.data = unescaped(token);
    return;
  }
  const before = attributes(last);
  attributes(token).forEach(([name, value], place) => {
    if (before[place][1] !== value) node.setAttribute(name, unescaped(value));
  });
}

/**
 * A part of the panel: its HTML, and the texts and values that have changed since that was sent. For those no node is
 * made: what is thrown away twice a second makes the browser look through all that JupyterLab holds, which takes longer
 * than the drawing.
 */
class Part {
  element = document.createElement("div");
  #base = "";
  #tokens = [];
  #nodes = [];
  #changed = [];

  draw(base, changes) {
    const wanted = new Map(changes);
    // A base that has come back, while nobody looked, begins with no changes.
    if (base !== this.#base || !this.#changed.every((place) => wanted.has(place))) this.#drawWhole(base);
    for (const [place, token] of wanted) {
      if (token === this.#tokens[place]) continue;
      retouch(this.#nodes[place], token, this.#tokens[place]);
      this.#tokens[place] = token;
    }
    this.#changed = [...wanted.keys()];
  }

  #drawWhole(base) {
    patchChildren(this.element, parsed(base));
    this.#base = base;
    this.#tokens = tokens(base);
    this.#nodes = this.#nodesOf(this.#tokens);
  }

  /** The node that each token has made, in the document's order; a closing tag has none of its own. */
  #nodesOf(wanted) {
    const walker = document.createTreeWalker(this.element, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
    return wanted.map((token) => (token.startsWith("</") ? null : walker.nextNode()));
  }
}

function render({ model, el }) {
  const panel = document.createElement("div");
  panel.className = "oc-panel";
  panel.setAttribute("role", "group");
  panel.setAttribute("aria-label", "OpenClaw panel");
  const parts = Object.fromEntries(PARTS.map((name) => [name, new Part()]));
  const buttons = buttonRow(model);
  panel.append(parts.head.element, buttons.row, parts.devices.element, parts.measured.element);
  el.append(panel);

  let seen = true;
  const draw = () => {
    if (!seen) return;
    const changes = model.get("changes");
    for (const name of PARTS) parts[name].draw(model.get(name), changes[name] ?? []);
  };
  const listeners = [
    ...[...PARTS, "changes"].map((name) => [`change:${name}`, draw]),
    ["change:run", buttons.update],
  ];
  for (const [event, listener] of listeners) model.on(event, listener);

  const observer = new IntersectionObserver((entries) => {
    const now = entries[entries.length - 1].isIntersecting;
    if (now !== seen) model.send({ kind: "seen", seen: now });
    seen = now;
    draw();
  });
  observer.observe(panel);
  draw();
  model.send({ kind: "here" });

  return () => {
    observer.disconnect();
    for (const [event, listener] of listeners) model.off(event, listener);
  };
}

export default { render };
