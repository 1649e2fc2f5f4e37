// The theme that was chosen, before anything is drawn; a classic script, since modules run after
// the first drawing.
try {
  const theme = JSON.parse(localStorage.getItem("negamax.theme"));
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // storage is blocked: the system's theme
}
