//! A run as one HTML page: no script, nothing fetched, light or dark as the reader's system is.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

use super::chart::{Point, Stack, escape, grouped, line, stacked};
use super::log::Run;
use super::memory::{MemoryReport, TierReport};
use super::style::mib;
use crate::error::counted;

/// Number of colours in the style sheet; later categories share the last one's neutral.
const COLOURS: usize = 8;
const STYLE: &str = include_str!("page.css");

/// The page of a run; either part may be missing.
pub fn page(title: &str, log: Option<&Run>, memory: Option<&MemoryReport>) -> String {
    let title = escape(title);
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>{title} · Castor</title>\n<style>\n{STYLE}</style></head>\n<body><main>\n\
         <header><p class=\"brand\">Castor · run report</p><h1>{title}</h1>{}</header>\n",
        subtitle(log, memory)
    );
    html.push_str(&tiles(log, memory));
    if let Some(memory) = memory {
        memory_section(&mut html, memory);
    }
    if let Some(run) = log.filter(|run| !run.steps.is_empty()) {
        steps_section(&mut html, run);
    }
    if let Some(run) = log.filter(|run| !run.plans.is_empty()) {
        plans_section(&mut html, run);
    }
    if let Some(memory) = memory {
        links_section(&mut html, memory);
        chunks_section(&mut html, memory);
    }
    if let Some(run) = log {
        details(&mut html, "Configuration", &run.header);
        if let Some(footer) = &run.footer {
            details(&mut html, "Results", footer);
        }
    }
    html.push_str("</main></body></html>\n");
    html
}

fn subtitle(log: Option<&Run>, memory: Option<&MemoryReport>) -> String {
    let mut parts = Vec::new();
    if let Some(memory) = memory {
        parts.push(format!("rank {} of {}", memory.rank, memory.world));
        parts.push(format!("{} ticks a step", memory.ticks.len()));
        parts.push(format!("{} chunks", memory.chunks.len()));
    }
    if let Some(run) = log {
        parts.push(format!("{} steps", run.steps.len()));
        let skipped = run.steps.iter().filter(|step| step.skipped).count();
        if skipped > 0 {
            parts.push(format!("{skipped} skipped"));
        }
        if run.footer.is_none() {
            parts.push("did not end in order".into());
        }
        parts.extend(run.inexact().map(|why| format!("inexact: {}", escape(why))));
    }
    format!("<p class=\"quiet\">{}</p>", parts.join(" · "))
}

fn tile(html: &mut String, name: &str, value: &str, note: &str) {
    let _ = write!(
        html,
        "<div class=\"tile\"><span>{}</span><strong>{}</strong><em>{}</em></div>",
        escape(name),
        escape(value),
        escape(note)
    );
}

fn tiles(log: Option<&Run>, memory: Option<&MemoryReport>) -> String {
    let mut html = String::from("<section class=\"tiles\">");
    if let Some(run) = log
        && let (Some(first), Some(last)) = (run.steps.first(), run.steps.last())
    {
        tile(&mut html, "Loss", &grouped(last.loss, 4), &format!("from {}", grouped(first.loss, 4)));
        let rate = run.tokens_per_second().map_or("n/a".into(), |rate| grouped(rate, 0));
        tile(&mut html, "Tokens per second", &rate, "steady, all ranks");
        if let Some((saves, seconds, held)) = run.saving() {
            let note = format!("for {}, {} s of writing", counted(saves as u64, "checkpoints"), grouped(seconds, 2));
            tile(&mut html, "Waited for saves", &format!("{} s", grouped(held, 2)), &note);
        }
    }
    if let Some(memory) = memory {
        let (step, stall) = (memory.step_seconds, memory.stall_seconds_per_step);
        let waited = format!("{} ms of waiting a step, all passes counted", grouped(stall * 1e3, 1));
        tile(&mut html, "Step time", &format!("{} ms", grouped(step * 1e3, 1)), &waited);
        for tier in &memory.tiers {
            tile(
                &mut html,
                &format!("Peak {}", tier.tier.replace("nvme", "NVMe")),
                &format!("{} MiB", mib(tier.measured_peak_bytes)),
                &format!("of {} MiB", mib(tier.budget_bytes)),
            );
        }
    }
    html.push_str("</section>\n");
    html
}

/// The same colour for a category in every tier, by order of first appearance.
fn colours(memory: &MemoryReport) -> BTreeMap<&str, usize> {
    let mut colours = BTreeMap::new();
    for category in memory.tiers.iter().flat_map(|tier| &tier.categories) {
        let next = colours.len().min(COLOURS);
        colours.entry(category.as_str()).or_insert(next);
    }
    colours
}

fn memory_section(html: &mut String, memory: &MemoryReport) {
    let colours = colours(memory);
    html.push_str("<section><h2>Memory over one step</h2><p class=\"quiet\">What each tier holds at every tick, in MiB. Point at a column for its numbers.</p>");
    for tier in &memory.tiers {
        let measured = !tier.measured.is_empty();
        let table = if measured { &tier.measured } else { &tier.predicted };
        let rows: Vec<(String, usize)> =
            tier.categories.iter().map(|name| (name.clone(), colours[name.as_str()])).collect();
        let predicted = if measured { TierReport::totals(&tier.predicted) } else { Vec::new() };
        let _ = write!(html, "<article><h3>{}</h3>{}", escape(tier_name(&tier.tier)), tier_facts(tier));
        html.push_str("<div class=\"legend\">");
        for ((name, colour), row) in rows.iter().zip(table) {
            if row.iter().any(|bytes| *bytes > 0) {
                let _ = write!(html, "<span><i style=\"background:var(--c{colour})\"></i>{}</span>", escape(name));
            }
        }
        if !predicted.is_empty() {
            html.push_str("<span><i class=\"dash\"></i>predicted total</span>");
        }
        html.push_str(if measured { "</div>" } else { "<span>predicted; not measured</span></div>" });
        let label = format!("Bytes of the {} tier by category over the ticks of a step", tier.tier);
        html.push_str(&stacked(&Stack {
            label: &label,
            ticks: &memory.ticks,
            rows: &rows,
            table,
            predicted: &predicted,
            budget: tier.budget_bytes,
        }));
        html.push_str("</article>");
    }
    html.push_str("</section>\n");
}

/// A tier as a heading.
fn tier_name(tier: &str) -> &str {
    match tier {
        "device" => "Device memory",
        "host" => "Host memory",
        "nvme" => "NVMe",
        other => other,
    }
}

fn tier_facts(tier: &TierReport) -> String {
    let fact = |name: &str, bytes: u64| format!("{name} <b>{}</b> MiB", mib(bytes));
    let mut facts = vec![fact("budget", tier.budget_bytes), fact("peak predicted", tier.predicted_peak_bytes)];
    if tier.measured_peak_bytes > 0 {
        let mut measured = fact("measured", tier.measured_peak_bytes);
        if tier.predicted_peak_bytes > 0 {
            let ratio = tier.measured_peak_bytes as f64 / tier.predicted_peak_bytes as f64;
            let _ = write!(measured, " ({:+.2} %)", (ratio - 1.0) * 100.0);
        }
        facts.push(measured);
    }
    facts.extend(tier.reserved_bytes.map(|bytes| fact("reserved", bytes)));
    facts.extend(tier.system_bytes.map(|bytes| fact("seen by the system", bytes)));
    format!("<p class=\"facts\">{}</p>", facts.join(" · "))
}

fn steps_section(html: &mut String, run: &Run) {
    let points = |value: &dyn Fn(&super::progress::StepRecord) -> f64, name: &str, places: usize| -> Vec<Point> {
        run.steps
            .iter()
            .map(|step| Point {
                step: step.step,
                value: value(step),
                title: format!(
                    "step {}{}\n{name}: {}\nlearning rate: {:.3e}\ngradient norm: {:.4}",
                    step.step,
                    if step.skipped { " (update skipped)" } else { "" },
                    grouped(value(step), places),
                    step.learning_rate,
                    step.grad_norm
                ),
            })
            .collect()
    };
    html.push_str("<section><h2>Training</h2><article><h3>Loss</h3>");
    html.push_str(&line("Loss over the steps", 0, &points(&|step| step.loss, "loss", 4), 3));
    html.push_str("</article><article><h3>Tokens per second</h3>");
    let rate = |step: &super::progress::StepRecord| step.tokens as f64 / step.seconds;
    html.push_str(&line("Tokens per second over the steps", 2, &points(&rate, "tokens/s", 0), 0));
    html.push_str("</article></section>\n");
}

/// Changes of the plan; memory and links of the page are those of the last.
fn plans_section(html: &mut String, run: &Run) {
    html.push_str(
        "<section><h2>Changes of the plan</h2><p class=\"quiet\">Memory and what is moved per step are shown for the \
         last plan.</p><article class=\"wide\"><table><thead><tr><th>After step</th><th>Reason</th><th>Step before, \
         s</th><th>Step planned, s</th><th>Change took, s</th><th>Moved before: planned, MiB</th><th>Counted, MiB</th>\
         </tr></thead><tbody>",
    );
    for plan in &run.plans {
        let sum = |bytes: &BTreeMap<String, u64>| mib(bytes.values().sum());
        let _ = write!(
            html,
            "<tr><th>{}</th><td class=\"word\">{}</td><td>{:.3}</td><td>{:.3}</td><td>{:.2}</td><td>{}</td><td>{}</td></tr>",
            plan.step,
            escape(&plan.reason),
            plan.before_s,
            plan.after_s,
            plan.took_s,
            sum(&plan.planned_bytes),
            sum(&plan.counted_bytes)
        );
    }
    html.push_str("</tbody></table></article></section>\n");
}

fn links_section(html: &mut String, memory: &MemoryReport) {
    if memory.links.is_empty() {
        return;
    }
    html.push_str(
        "<section><h2>Moved per step</h2><article class=\"wide\"><table><thead><tr><th>Link</th><th>Planned, MiB</th>\
         <th>Counted, MiB</th><th>Difference, bytes</th><th>While busy, GB/s</th><th class=\"bar\"></th></tr></thead><tbody>",
    );
    let most = memory.links.iter().map(|link| link.counted_bytes_per_step).max().unwrap_or(0).max(1);
    for link in &memory.links {
        let counted = link.counted_bytes_per_step;
        let rate = link.busy_seconds_per_step.filter(|seconds| *seconds > 0.0);
        let _ = write!(
            html,
            "<tr><th>{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class=\"bar\"><i style=\"width:{:.1}%\"></i></td></tr>",
            escape(&link.link),
            mib(link.planned_bytes_per_step),
            mib(counted),
            grouped(counted as f64 - link.planned_bytes_per_step as f64, 0),
            rate.map_or("n/a".into(), |seconds| grouped(counted as f64 / seconds / 1e9, 2)),
            100.0 * counted as f64 / most as f64
        );
    }
    html.push_str("</tbody></table></article></section>\n");
}

/// Chunks summed by role and home tier; the single ones on demand.
fn chunks_section(html: &mut String, memory: &MemoryReport) {
    if memory.chunks.is_empty() {
        return;
    }
    let mut roles: Vec<&str> = Vec::new();
    let mut homes: Vec<&str> = memory.tiers.iter().map(|tier| tier.tier.as_str()).collect();
    let mut sums: BTreeMap<(&str, &str), (u64, u64)> = BTreeMap::new();
    for chunk in &memory.chunks {
        let (role, home) = (chunk.role.as_str(), chunk.home.as_str());
        if !roles.contains(&role) {
            roles.push(role);
        }
        if !homes.contains(&home) {
            homes.push(home);
        }
        let (count, bytes) = sums.entry((role, home)).or_default();
        *count += 1;
        *bytes += chunk.bytes;
    }
    html.push_str("<section><h2>Where chunks live</h2><article class=\"wide\"><table><thead><tr><th>Role</th>");
    for home in &homes {
        let _ = write!(html, "<th>{}, MiB</th>", escape(home));
    }
    html.push_str("<th>Sum, MiB</th><th>Chunks</th></tr></thead><tbody>");
    let row = |name: &str, wanted: Option<&str>| {
        let matching = |home: Option<&str>| {
            sums.iter()
                .filter(|((role, at), _)| {
                    wanted.is_none_or(|wanted| wanted == *role) && home.is_none_or(|home| home == *at)
                })
                .fold((0, 0), |(chunks, sum), (_, (count, bytes))| (chunks + count, sum + bytes))
        };
        let mut row = format!("<tr><th>{}</th>", escape(name));
        for home in &homes {
            let _ = match matching(Some(home)) {
                (0, _) => write!(row, "<td class=\"quiet\">–</td>"),
                (_, bytes) => write!(row, "<td>{}</td>", mib(bytes)),
            };
        }
        let (count, bytes) = matching(None);
        let _ = write!(row, "<td>{}</td><td>{count}</td></tr>", mib(bytes));
        row
    };
    for role in roles {
        html.push_str(&row(role, Some(role)));
    }
    let _ = write!(html, "</tbody><tfoot>{}</tfoot></table>", row("all", None));
    html.push_str("<details><summary>Every chunk</summary><table><thead><tr><th>Group</th><th>Role</th><th>Home</th><th>MiB</th></tr></thead><tbody>");
    for chunk in &memory.chunks {
        let _ = write!(
            html,
            "<tr><th>{}</th><td class=\"word\">{}</td><td class=\"word\">{}</td><td>{}</td></tr>",
            escape(&chunk.group),
            escape(&chunk.role),
            escape(&chunk.home),
            mib(chunk.bytes)
        );
    }
    html.push_str("</tbody></table></details></article></section>\n");
}

/// A JSON object as a folded list of dotted names and values.
fn details(html: &mut String, title: &str, value: &Value) {
    let mut pairs = Vec::new();
    flatten("", value, &mut pairs);
    if pairs.is_empty() {
        return;
    }
    let _ = write!(html, "<section><details><summary>{title}</summary><dl>");
    for (name, value) in pairs {
        let _ = write!(html, "<dt>{}</dt><dd>{}</dd>", escape(&name), escape(&value));
    }
    html.push_str("</dl></details></section>\n");
}

fn flatten(name: &str, value: &Value, pairs: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                flatten(&name, value, pairs);
            }
        }
        Value::Null => {}
        Value::String(text) => pairs.push((name.to_owned(), text.clone())),
        other => pairs.push((name.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::{ChunkReport, LinkReport};
    use super::super::progress::StepRecord;
    use super::*;

    fn memory() -> MemoryReport {
        MemoryReport {
            version: 1,
            world: 1,
            ticks: vec!["embed <0>".into(), "head & loss".into()],
            tiers: vec![TierReport {
                tier: "device".into(),
                budget_bytes: 40 << 20,
                categories: vec!["parameters".into(), "<script>".into()],
                predicted: vec![vec![20 << 20, 20 << 20], vec![0, 5 << 20]],
                measured: vec![vec![20 << 20, 20 << 20], vec![0, 5 << 20]],
                predicted_peak_bytes: 25 << 20,
                measured_peak_bytes: 25 << 20,
                ..TierReport::default()
            }],
            links: vec![LinkReport { link: "host to device".into(), ..LinkReport::default() }],
            chunks: vec![ChunkReport {
                group: "block 0".into(),
                role: "parameter".into(),
                bytes: 3 << 20,
                home: "device".into(),
            }],
            step_seconds: 0.2,
            ..MemoryReport::default()
        }
    }

    fn run(losses: &[f64]) -> Run {
        let steps = losses.iter().zip(1..).map(|(&loss, step)| StepRecord {
            step,
            loss,
            tokens: 10,
            seconds: 0.1,
            ..StepRecord::default()
        });
        Run { steps: steps.collect(), header: serde_json::json!({"inexact": "by <choice>"}), ..Run::default() }
    }

    #[test]
    fn the_page_is_complete_offline_and_escapes_what_it_is_given() {
        let html = page("a<b", Some(&run(&[4.0, f64::NAN, 3.0])), Some(&memory()));
        for part in [
            "a&lt;b",
            "inexact: by &lt;choice&gt;",
            "&lt;script&gt;",
            "head &amp; loss",
            "predicted total",
            "budget 40.0 MiB",
            "Every chunk",
            "block 0",
        ] {
            assert!(html.contains(part), "{part}");
        }
        for part in ["<script", "http:", "https:", "src=", "NaN\"", "NaN ", "inf\""] {
            assert!(!html.contains(part), "{part}");
        }
    }

    #[test]
    fn any_part_may_be_missing() {
        let planned =
            MemoryReport { tiers: vec![TierReport { measured: Vec::new(), ..memory().tiers.remove(0) }], ..memory() };
        assert!(page("p", None, Some(&planned)).contains("predicted; not measured"));
        assert!(page("p", None, Some(&MemoryReport::default())).ends_with("</html>\n"));
        for losses in [&[][..], &[f64::NAN], &[2.0], &[2.0, 2.0]] {
            assert!(page("p", Some(&run(losses)), None).ends_with("</html>\n"));
        }
    }
}
