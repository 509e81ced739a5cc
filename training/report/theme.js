// The light and dark buttons of a page. It follows the system until one of them is pressed.

function startTheme() {
  const buttons = [...document.querySelectorAll("button[data-theme]")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let pressed = false;

  function set(theme) {
    document.documentElement.dataset.theme = theme;
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(button.dataset.theme === theme));
    }
  }

  const follow = () => pressed || set(dark.matches ? "dark" : "light");
  for (const button of buttons) {
    button.addEventListener("click", () => { pressed = true; set(button.dataset.theme); });
  }
  dark.addEventListener("change", follow);
  follow();
}
