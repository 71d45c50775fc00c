"use strict";
const tip = document.getElementById("tip");
const main = document.querySelector("main");

function show(target, x, y) {
  tip.textContent = target.dataset.tip;
  tip.hidden = false;
  tip.style.left = Math.min(x + 12, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(y + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
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
  const same = main.dataset.selected === stage;
  if (same) delete main.dataset.selected;
  else main.dataset.selected = stage;
  for (const part of document.querySelectorAll("[data-stage]")) {
    part.classList.toggle("on", !same && part.dataset.stage === stage);
  }
}

document.addEventListener("click", (event) => {
  const pick = event.target.closest("[data-pick]");
  if (pick) select(pick.dataset.pick);
});
document.addEventListener("keydown", (event) => {
  const pick = event.target.closest("[data-pick]");
  if (pick && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    select(pick.dataset.pick);
  }
});
