// Elements without markup: every text is set as text, so nothing of a journal is ever parsed.

const SVG = "http://www.w3.org/2000/svg";

// A journal may hold any number; a drawing takes no negative width and nothing beyond all bounds.
function drawable(name, value) {
  if (!Number.isFinite(value)) return 0;
  return name === "width" || name === "height" ? Math.max(0, value) : value;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : typeof value === "number" ? drawable(name, value) : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

function h(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function s(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

// A text of a journal: its direction cannot reach its neighbours.
function said(text, kind) {
  return h("bdi", { class: kind || "said" }, text === null || text === undefined || text === "" ? "–" : text);
}

function clear(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(Boolean));
  return element;
}

function panel(id, title, note, ...children) {
  return h(
    "section",
    { id, "aria-labelledby": `${id}-title`, class: "panel" },
    h("h2", { id: `${id}-title` }, title),
    note && h("p", { class: "note" }, note),
    children,
  );
}

// A picture that is drawn again when its place changes its width.
function picture(label, draw) {
  const place = h("div", { class: "picture", role: "img", "aria-label": label });
  let width = 0;
  place.redraw = () => {
    if (width > 0) clear(place, draw(width, place));
  };
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now > 0 && now !== width) {
      width = now;
      place.redraw();
    }
  }).observe(place);
  return place;
}

// A table: columns are [title, "number" or nothing]; cells are texts or elements.
function table(caption, columns, rows, kind) {
  const head = columns.map(([title, is]) => h("th", { scope: "col", class: is }, title));
  const body = rows.map((row) => {
    const cells = row.cells || row;
    return h(
      "tr",
      { class: row.kind, "data-seq": row.seq },
      cells.map((cell, at) =>
        h(at === 0 ? "th" : "td", { scope: at === 0 ? "row" : null, class: columns[at][1], "data-label": columns[at][0] }, cell),
      ),
    );
  });
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: kind || "stack" }, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

function button(text, action, attributes) {
  return h("button", { type: "button", onclick: action, ...attributes }, text);
}

// A label and what it belongs to, by its id; what is shown may be more than the control alone.
function field(label, control, shown) {
  return h("div", { class: "field" }, h("label", { for: control.id }, label), shown || control);
}

function options(values, chosen) {
  return values.map(([value, text]) => h("option", { value, selected: value === chosen }, clip(text)));
}

const announcer = h("div", { class: "unseen", role: "status", "aria-live": "polite" });

// A name in a narrow cell: no name that makes sense is longer.
function clip(text, most = 64) {
  return typeof text === "string" && text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

const ruler = document.createElement("canvas").getContext("2d");
const shortened = new Map();

// Text in a drawing, cut to a width in pixels.
function cut(text, width) {
  const key = `${Math.floor(width)} ${text}`;
  if (!shortened.has(key)) shortened.set(key, cutNow(text, width));
  return shortened.get(key);
}

function cutNow(text, width) {
  ruler.font = "12.5px system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'Liberation Sans', Arial, sans-serif";
  if (ruler.measureText(text).width <= width) return text;
  let [least, most] = [0, text.length];
  while (most - least > 1) {
    const middle = Math.floor((least + most) / 2);
    if (ruler.measureText(`${text.slice(0, middle)}…`).width <= width) least = middle;
    else most = middle;
  }
  return least < 3 ? "" : `${text.slice(0, least)}…`;
}
