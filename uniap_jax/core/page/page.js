"use strict";
const tip = document.getElementById("tip");
const main = document.querySelector("main");

function show(target, x, y) {
  tip.textContent = target.dataset.tip;
  tip.hidden = false;
  tip.style.left = Math.max(8, Math.min(x + 12, window.innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(8, Math.min(y + 14, window.innerHeight - tip.offsetHeight - 8)) + "px";
}

document.addEventListener("pointermove", (event) => {
  const target = event.target.closest("[data-tip]");
  if (target) show(target, event.clientX, event.clientY);
  else tip.hidden = true;
});
document.addEventListener("focusin", (event) => {
  const target = event.target.closest("[data-tip]");
  if (!target) return;
  const box = target.getBoundingClientRect();
  show(target, box.left, box.bottom);
});
document.addEventListener("focusout", () => { tip.hidden = true; });

function select(stage) {
  const same = stage === undefined || main.dataset.selected === stage;
  if (same) delete main.dataset.selected;
  else main.dataset.selected = stage;
  for (const part of document.querySelectorAll("[data-stage]")) {
    part.classList.toggle("on", !same && part.dataset.stage === stage);
  }
  for (const pick of document.querySelectorAll("[data-pick]")) {
    pick.setAttribute("aria-pressed", String(!same && pick.dataset.pick === stage));
  }
}

document.addEventListener("click", (event) => {
  const pick = event.target.closest("[data-pick]");
  const part = event.target.closest("[data-stage]");
  if (pick) select(pick.dataset.pick);
  else if (part) select(part.dataset.stage);
});

// One mark of each drawing is in the order of the tab key; arrows go on from there.
const drawings = [...document.querySelectorAll("svg")].map((svg) => [...svg.querySelectorAll("[data-tip]")]);
for (const marks of drawings) {
  if (marks.length) marks[0].tabIndex = 0;
}

function step(from, key) {
  const marks = drawings.find((list) => list.includes(from));
  const place = marks.indexOf(from);
  if (key === "ArrowRight") return marks[place + 1];
  if (key === "ArrowLeft") return marks[place - 1];
  const here = from.getBoundingClientRect();
  const sign = key === "ArrowDown" ? 1 : -1;
  const rows = marks.filter((mark) => sign * (mark.getBoundingClientRect().top - here.top) > 1);
  const far = (mark) => {
    const box = mark.getBoundingClientRect();
    return 1000 * Math.abs(box.top - here.top) + Math.abs(box.left - here.left);
  };
  return rows.sort((a, b) => far(a) - far(b))[0];
}

document.addEventListener("keydown", (event) => {
  const pick = event.target.closest("[data-pick]");
  const mark = event.target.closest("[data-tip]");
  if (event.key === "Escape") {
    select(undefined);
    tip.hidden = true;
  } else if ((pick || mark) && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    const stage = pick ? pick.dataset.pick : mark.dataset.stage;
    if (stage !== undefined) select(stage);
  } else if (mark && event.key.startsWith("Arrow")) {
    const next = step(mark, event.key);
    if (!next) return;
    event.preventDefault();
    mark.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
});
