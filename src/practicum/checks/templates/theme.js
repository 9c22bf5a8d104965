// Runs before the first paint, so that a remembered theme does not flash in.
(() => {
  try {
    const remembered = localStorage.getItem("practicum-theme");
    if (remembered === "dark" || remembered === "light") document.documentElement.dataset.theme = remembered;
  } catch { /* storage may be closed to files: then the system's theme counts */ }
})();
