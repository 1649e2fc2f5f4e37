// Applies the chosen theme before the page is drawn. This is a classic script, because modules run
// after the first drawing.
try {
  const theme = JSON.parse(localStorage.getItem("negamax.theme"));
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // without storage the page uses the system's theme
}
