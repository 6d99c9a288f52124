// Draws the report of a running job again every five seconds, without moving what is being read.
"use strict";
const PERIOD_MS = 5000;

async function redraw() {
  const key = (one, index) => one.id || index;
  const open = new Map([...document.querySelectorAll("details")].map((one, index) => [key(one, index), one.open]));
  const chosen = [...document.querySelectorAll("input:checked")].map((one) => one.id);
  let note = "";
  try {
    const answer = await fetch("/", { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.title = next.title;
    document.querySelector("main").replaceWith(next.querySelector("main"));
    document.querySelectorAll("details").forEach((one, index) => { one.open = open.get(key(one, index)) ?? one.open; });
    for (const id of chosen) document.getElementById(id)?.click();
    note = "live, drawn at " + new Date().toLocaleTimeString();
  } catch (error) {
    note = "libra serve does not answer: " + error.message;
  }
  let line = document.getElementById("live");
  if (!line) {
    line = document.createElement("p");
    line.id = "live";
    line.className = "about";
    document.querySelector("main").append(line);
  }
  line.textContent = note;
  const over = document.querySelector("main").dataset.over === "true";
  if (!over) setTimeout(redraw, PERIOD_MS);
}

setTimeout(redraw, PERIOD_MS);
