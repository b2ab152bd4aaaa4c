import { setKey } from "./api.js";
import { startLive } from "./live.js";
import { startPlayground } from "./playground.js";

const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  root.dataset.theme = localStorage.getItem("theme") ?? (prefersDark.matches ? "dark" : "light");
}

document.getElementById("theme").addEventListener("click", () => {
  localStorage.setItem("theme", root.dataset.theme === "dark" ? "light" : "dark");
  applyTheme();
});
prefersDark.addEventListener("change", applyTheme);
applyTheme();

document.getElementById("key").addEventListener("change", (event) => setKey(event.target.value));

startPlayground();
startLive();
