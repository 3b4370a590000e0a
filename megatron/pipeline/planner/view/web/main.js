// The self-contained page: what page.py embeds, as a table of facts and as timelines.

/** The table of facts: one row a panel, one column for every fact that any panel has. */
function fillFacts(entries) {
  const table = document.querySelector("#facts table");
  const names = [...new Set(entries.flatMap((entry) => Object.keys(entry.facts)))];
  const head = element("tr", "", element("thead", "", table));
  for (const name of ["schedule", ...names]) element("th", name, head);
  const body = element("tbody", "", table);
  for (const entry of entries) {
    const row = element("tr", "", body);
    element("th", entry.title, row);
    for (const name of names) element("td", entry.facts[name] ?? "", row);
  }
}

async function main() {
  const data = JSON.parse(byId("data").textContent);
  const panels = await Promise.all(data.entries.map((entry) => Panel.read(entry, data.kinds)));
  fillFacts(data.entries);
  const timelines = new Timelines(data);
  timelines.setPanels(panels);
  timelines.fitRows();
}

main().catch((error) => {
  byId("status").textContent = `This browser cannot show the page (${error}); it needs one from 2023 or later.`;
});
