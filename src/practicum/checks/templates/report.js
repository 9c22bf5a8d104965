(() => {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
  const holder = document.getElementById("figures");
  const figures = holder ? JSON.parse(holder.textContent) : {};
  const waiting = new Set(Object.keys(figures));

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark.matches);

  const showTheme = () => button.setAttribute("aria-pressed", String(isDark()));

  // A colour in a figure is the name of a variable of the style sheet.
  const coloured = (node, styles) => {
    if (Array.isArray(node)) return node.map((item) => coloured(item, styles));
    if (node === null || typeof node !== "object") return node;
    return Object.fromEntries(Object.entries(node).map(([key, value]) => {
      const isVariable = key.endsWith("color") && typeof value === "string" && value.startsWith("--");
      return [key, isVariable ? styles.getPropertyValue(value).trim() : coloured(value, styles)];
    }));
  };

  const draw = (id) => {
    const place = document.getElementById(id);
    const styles = getComputedStyle(root);
    const { data, layout } = coloured(figures[id], styles);
    layout.font.family = getComputedStyle(document.body).fontFamily;
    layout.height = place.clientHeight;
    waiting.delete(id);
    return Plotly.react(place, data, layout, { displayModeBar: false, responsive: true, showTips: false });
  };

  const drawAll = () => Object.keys(figures).forEach(draw);

  const later = window.requestIdleCallback || ((call) => setTimeout(call, 1));

  const drawWaiting = () => {
    const next = waiting.values().next();
    if (next.done) {
      root.dataset.plots = "drawn";
      return;
    }
    draw(next.value);
    later(drawWaiting);
  };

  const themeChanged = () => {
    showTheme();
    Object.keys(figures).filter((id) => !waiting.has(id)).forEach(draw);
  };

  button.hidden = false;
  showTheme();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("practicum-theme", root.dataset.theme);
    } catch { /* not remembered where storage is closed */ }
    themeChanged();
  });
  systemIsDark.addEventListener("change", themeChanged);

  let beforePrint = null;
  addEventListener("beforeprint", () => {
    beforePrint = { theme: root.dataset.theme, closed: [...document.querySelectorAll("details:not([open])")] };
    root.dataset.theme = "light";
    beforePrint.closed.forEach((details) => { details.open = true; });
    drawAll();
  });
  addEventListener("afterprint", () => {
    if (!beforePrint) return;
    if (beforePrint.theme) root.dataset.theme = beforePrint.theme;
    else delete root.dataset.theme;
    beforePrint.closed.forEach((details) => { details.open = false; });
    beforePrint = null;
    drawAll();
  });

  later(drawWaiting);
})();
