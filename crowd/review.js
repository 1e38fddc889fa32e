"use strict";
const cards = [...document.querySelectorAll("article")], root = document.documentElement;
const one = (selector, inside = document) => inside.querySelector(selector);
const classes = [...one("#of-class").options].slice(1).map((option) => option.text);
const store = "irnet review " + root.dataset.key;
let decisions = {}, current = null, kept = true, saved = true; // decisions: by a sample's name

try {
  decisions = JSON.parse(localStorage.getItem(store) || "{}") || {};
} catch (error) {
  kept = false; // a browser that keeps nothing for files: the download remains
}

function keep() {
  try {
    localStorage.setItem(store, JSON.stringify(decisions));
  } catch (error) {
    kept = false;
  }
}

function show() {
  const chosen = one("#of-class").value, open = one("#open").checked;
  let shown = 0, done = 0;
  for (const card of cards) {
    const decision = decisions[card.dataset.name];
    card.toggleAttribute("data-decided", Boolean(decision));
    card.hidden = (chosen !== "" && !card.dataset.classes.split(" ").includes(chosen)) ||
      (open && Boolean(decision) && card !== current);
    shown += !card.hidden;
    done += Boolean(decision);
    for (const button of card.querySelectorAll("button"))
      button.setAttribute("aria-pressed", String(Boolean(decision) && decision.decision === button.dataset.do));
    const field = one(".choose", card);
    if (document.activeElement !== field) field.value = decision && decision.decision === "choose" ? decision.label : "";
    one(".verdict", card).textContent = !decision ? "" : "decided: " + (decision.label || "none of these");
  }
  one("#progress").value = `${done} of ${cards.length} decided, ${shown} shown`;
  one("#download").disabled = !done;
  one("#lost").hidden = kept;
}

function go(card, focus = true) {
  if (!card) return;
  current = card;
  for (const other of cards) {
    const here = other === card;
    other.toggleAttribute("aria-current", here);
    other.tabIndex = here ? 0 : -1;
    for (const control of other.querySelectorAll("button, .choose")) control.tabIndex = here ? 0 : -1;
  }
  if (focus) {
    card.focus({ preventScroll: true });
    card.scrollIntoView({ block: "nearest" });
  }
}

function beside(step) {
  const open = cards.filter((card) => !card.hidden || card === current);
  return open[open.indexOf(current) + step];
}

function decide(card, decision, label, stay = false) {
  if (decision) decisions[card.dataset.name] = { decision, label };
  else delete decisions[card.dataset.name];
  saved = false;
  keep();
  const rest = cards.slice(cards.indexOf(card) + 1).concat(cards);
  const next = rest.find((other) => !other.hidden && !decisions[other.dataset.name]);
  if (decision && !stay && next) go(next);
  show();
}

function act(card, what) {
  if (what === "accept") decide(card, "accept", card.dataset.proposed);
  else if (what === "keep") decide(card, "keep", card.dataset.kept);
  else if (what === "none") decide(card, "none", "");
  else if (what === "undo") decide(card, "", "");
}

function cell(value) {
  return /[",;\t\r\n]/.test(value) ? '"' + value.replaceAll('"', '""') + '"' : value;
}

function download() {
  const lines = [[root.dataset.column, "decision", "label", "proposed", "given"]];
  for (const { dataset } of cards) {
    const found = decisions[dataset.name];
    if (found) lines.push([dataset.name, found.decision, found.label, dataset.proposed, dataset.kept]);
  }
  const text = lines.map((line) => line.map(cell).join(",") + "\n").join("");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = "decisions.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  saved = true;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest("select, input:not([type=checkbox])"), card = current;
  if (field) { // what is typed there is for it
    if (!["Enter", "Escape"].includes(event.key) || !field.classList.contains("choose")) return;
    event.preventDefault();
    go(card);
    const decided = decisions[card.dataset.name];
    if (event.key === "Enter" && decided && decided.decision === "choose") decide(card, "choose", decided.label);
    show();
    return;
  }
  const words = { a: "accept", k: one('[data-do="keep"]', card) ? "keep" : "accept", n: "none", u: "undo" };
  const key = event.key.toLowerCase(), number = "123456789".indexOf(event.key);
  if (words[key]) act(card, words[key]);
  else if (key === "c") one(".choose", card).focus();
  else if (key === "d") download();
  else if (key === "arrowright") go(beside(1));
  else if (key === "arrowleft") go(beside(-1));
  else if (number >= 0 && number < classes.length && classes.length < 10) decide(card, "choose", classes[number]);
  else return;
  event.preventDefault();
});

for (const card of cards) {
  card.addEventListener("focusin", () => go(card, false));
  for (const button of card.querySelectorAll("button"))
    button.addEventListener("click", () => act(card, button.getAttribute("aria-pressed") === "true" ? "undo" : button.dataset.do));
  one(".choose", card).addEventListener("change", (event) => {
    if (classes.includes(event.target.value)) decide(card, "choose", event.target.value, true);
  });
}
one("#of-class").addEventListener("change", show);
one("#open").addEventListener("change", show);
one("#download").addEventListener("click", download);
one("form").addEventListener("submit", (event) => event.preventDefault());
addEventListener("beforeunload", (event) => {
  if (!kept && !saved) event.preventDefault();
});
show();
go(cards.find((card) => !decisions[card.dataset.name]) || cards[0], false);
