// The list of versions. It is shown where versions.json stands beside the sites of the releases, and nowhere else.
addEventListener("DOMContentLoaded", async () => {
  const label = document.querySelector(".versions");
  if (!label || !location.protocol.startsWith("http")) return;
  const root = new URL(label.dataset.root || "./", location.href);
  for (const place of [root, new URL("../", root)]) {
    const answer = await fetch(new URL("versions.json", place)).catch(() => null);
    if (!answer?.ok) continue;
    const select = label.querySelector("select");
    for (const { name, folder } of await answer.json()) {
      const site = new URL(folder, place);
      select.add(new Option(name, site, false, site.href === root.href));
    }
    select.onchange = async () => {
      const page = new URL(location.href.slice(root.href.length), select.value);
      const there = await fetch(page, { method: "HEAD" }).catch(() => null);
      location.href = there?.ok ? page : select.value;  // an older version may not have this page
    };
    label.hidden = false;
    return;
  }
});
