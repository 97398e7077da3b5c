//! Two charts as inline SVG: areas stacked over the ticks of a step, and a line over the steps of a run.
//!
//! Colours come from the page's style sheet (`--c0` …), so that both themes fit. Every column of a chart carries a
//! `<title>`, which browsers show as a tooltip without any script.

use std::fmt::Write as _;

/// Size of a chart in its own units; the page scales it.
const WIDTH: f64 = 960.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 30.0;
/// More columns than this are thinned: a screen has no more pixels.
const COLUMNS: usize = 720;

/// Text for HTML.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A plot's frame: how values become positions.
struct Frame {
    height: f64,
    low: f64,
    high: f64,
    step: f64,
}

impl Frame {
    /// Rounds the range outwards to whole steps of 1, 2 or 5 times a power of ten.
    fn around(low: f64, high: f64, height: f64) -> Frame {
        let span = if high > low { high - low } else { high.abs().max(1.0) };
        let rough = span / 4.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|factor| factor * power)
            .find(|step| *step >= rough)
            .unwrap_or(10.0 * power);
        let low = (low / step).floor() * step;
        let high = ((high / step).ceil() * step).max(low + step);
        Frame { height, low, high, step }
    }

    fn y(&self, value: f64) -> f64 {
        let plot = self.height - TOP - BOTTOM;
        TOP + plot * (1.0 - (value - self.low) / (self.high - self.low))
    }

    /// Opens the SVG and draws the grid with its labels.
    fn open(&self, label: &str) -> String {
        let mut svg =
            format!("<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"{}\">", self.height, escape(label));
        let places = (-self.step.log10().floor()).max(0.0) as usize;
        let lines = ((self.high - self.low) / self.step).round() as usize;
        for line in 0..=lines {
            let value = self.low + line as f64 * self.step;
            let y = self.y(value);
            let class = if line == 0 { "axis" } else { "grid" };
            let _ = write!(
                svg,
                "<line class=\"{class}\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 8.0,
                y + 4.0,
                grouped(value, places)
            );
        }
        svg
    }

    /// An invisible column from top to bottom that carries a tooltip.
    fn hit(&self, svg: &mut String, x: f64, width: f64, title: &str) {
        let _ = write!(
            svg,
            "<rect class=\"hit\" x=\"{x:.2}\" y=\"{TOP}\" width=\"{width:.2}\" height=\"{:.1}\"><title>{}</title></rect>",
            self.height - TOP - BOTTOM,
            escape(title)
        );
    }

    fn x_label(&self, svg: &mut String, x: f64, anchor: &str, text: &str) {
        let _ = write!(
            svg,
            "<text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
            self.height - BOTTOM + 19.0,
            escape(text)
        );
    }
}

/// A number with thousands separated and this many places.
pub(super) fn grouped(value: f64, places: usize) -> String {
    let text = format!("{:.places$}", value.abs());
    let (whole, rest) =
        text.split_once('.').map_or((text.as_str(), String::new()), |(whole, rest)| (whole, format!(".{rest}")));
    let sign = if value < 0.0 { "−" } else { "" };
    let whole = whole.parse().map_or(whole.to_owned(), super::metrics::thousands);
    format!("{sign}{whole}{rest}")
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// What a stacked chart shows.
pub(super) struct Stack<'a> {
    /// For readers that do not see it.
    pub label: &'a str,
    /// Names of the columns.
    pub ticks: &'a [String],
    /// Name and index of its colour, per row.
    pub rows: &'a [(String, usize)],
    /// Bytes, row × column.
    pub table: &'a [Vec<u64>],
    /// Sum per column by the plan; drawn as a line.
    pub predicted: &'a [u64],
    /// Drawn as a line where it lies within reach.
    pub budget: u64,
}

/// Areas stacked over the ticks, in MiB; each tick is a column of its own width, for bytes do not change within it.
pub(super) fn stacked(stack: &Stack<'_>) -> String {
    let totals = super::memory::TierReport::totals(stack.table);
    let top = totals.iter().chain(stack.predicted).copied().max().unwrap_or(0);
    // A budget far above what is used would press everything flat; the text names it all the same.
    let budget = (stack.budget > 0 && stack.budget <= top.saturating_mul(2)).then_some(stack.budget);
    let frame = Frame::around(0.0, mib(top.max(budget.unwrap_or(0))), 260.0);
    let columns = thinned(&totals, stack.ticks.len());
    let width = (WIDTH - LEFT - RIGHT) / columns.len().max(1) as f64;
    let x = |column: usize| LEFT + column as f64 * width;
    let mut svg = frame.open(stack.label);
    let mut below = vec![0u64; columns.len()];
    for ((_, colour), row) in stack.rows.iter().zip(stack.table) {
        let above: Vec<u64> =
            columns.iter().zip(&below).map(|(&tick, low)| low + row.get(tick).copied().unwrap_or(0)).collect();
        if above != below {
            let _ = write!(svg, "<path class=\"area\" style=\"fill:var(--c{colour})\" d=\"M");
            for (column, value) in above.iter().enumerate() {
                let y = frame.y(mib(*value));
                let _ = write!(svg, "{:.2} {y:.2}L{:.2} {y:.2} ", x(column), x(column + 1));
            }
            for (column, value) in below.iter().enumerate().rev() {
                let y = frame.y(mib(*value));
                let _ = write!(svg, "L{:.2} {y:.2}L{:.2} {y:.2}", x(column + 1), x(column));
            }
            svg.push_str("Z\"/>");
        }
        below = above;
    }
    if !stack.predicted.is_empty() {
        svg.push_str("<path class=\"plan\" d=\"M");
        for (column, &tick) in columns.iter().enumerate() {
            let y = frame.y(mib(stack.predicted.get(tick).copied().unwrap_or(0)));
            let _ = write!(svg, "{:.2} {y:.2}L{:.2} {y:.2} ", x(column), x(column + 1));
        }
        svg.push_str("\"/>");
    }
    if let Some(budget) = budget {
        let y = frame.y(mib(budget));
        let _ = write!(
            svg,
            "<line class=\"budget\" x1=\"{LEFT}\" x2=\"{0:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"tick strong\" x=\"{0:.1}\" y=\"{1:.1}\" text-anchor=\"end\">budget {2} MiB</text>",
            WIDTH - RIGHT,
            y - 5.0,
            grouped(mib(budget), 1)
        );
    }
    for (column, &tick) in columns.iter().enumerate() {
        let mut title = stack.ticks[tick].clone();
        for ((name, _), row) in stack.rows.iter().zip(stack.table) {
            if row[tick] > 0 {
                let _ = write!(title, "\n{name}: {} MiB", grouped(mib(row[tick]), 2));
            }
        }
        let total = totals.get(tick).copied().unwrap_or(0);
        let _ = write!(title, "\ntotal: {} MiB", grouped(mib(total), 2));
        if let Some(predicted) = stack.predicted.get(tick) {
            let _ = write!(title, "\npredicted: {} MiB", grouped(mib(*predicted), 2));
        }
        frame.hit(&mut svg, x(column), width, &title);
    }
    if let (Some(&first), Some(&last)) = (columns.first(), columns.last()) {
        frame.x_label(&mut svg, LEFT, "start", &stack.ticks[first]);
        let middle = columns[columns.len() / 2];
        if columns.len() > 2 {
            frame.x_label(&mut svg, x(columns.len() / 2), "middle", &stack.ticks[middle]);
        }
        frame.x_label(&mut svg, WIDTH - RIGHT, "end", &stack.ticks[last]);
    }
    svg.push_str("</svg>");
    svg
}

/// Columns to draw: all ticks, or of each run of neighbours the one with the largest total, so that peaks stay.
fn thinned(totals: &[u64], ticks: usize) -> Vec<usize> {
    if ticks <= COLUMNS {
        return (0..ticks).collect();
    }
    (0..COLUMNS)
        .filter_map(|column| {
            let run = column * ticks / COLUMNS..(column + 1) * ticks / COLUMNS;
            run.max_by_key(|tick| (totals.get(*tick), std::cmp::Reverse(*tick)))
        })
        .collect()
}

/// A value per step.
pub(super) struct Point {
    /// The step.
    pub step: u64,
    /// Not drawn if it is not finite.
    pub value: f64,
    /// Tooltip.
    pub title: String,
}

/// A line over the steps, in the colour of this index, with its last value written at its end.
pub(super) fn line(label: &str, colour: usize, points: &[Point], places: usize) -> String {
    let finite = || points.iter().map(|point| point.value).filter(|value| value.is_finite());
    let (Some(low), Some(high)) = (finite().reduce(f64::min), finite().reduce(f64::max)) else {
        return String::from("<p class=\"quiet\">Nothing to draw.</p>");
    };
    let frame = Frame::around(low, high, 220.0);
    let first = points[0].step as f64;
    let last = points[points.len() - 1].step as f64;
    let room = 56.0;
    let x = |step: f64| LEFT + (WIDTH - LEFT - RIGHT - room) * (step - first) / (last - first).max(1.0);
    let mut svg = frame.open(label);
    let _ = write!(svg, "<path class=\"line\" style=\"stroke:var(--c{colour})\" d=\"");
    let mut pen_down = false;
    for point in points {
        if point.value.is_finite() {
            let letter = if pen_down { 'L' } else { 'M' };
            let _ = write!(svg, "{letter}{:.2} {:.2}", x(point.step as f64), frame.y(point.value));
        }
        pen_down = point.value.is_finite();
    }
    svg.push_str("\"/>");
    if let Some(end) = points.iter().rev().find(|point| point.value.is_finite()) {
        let (x, y) = (x(end.step as f64), frame.y(end.value));
        let _ = write!(
            svg,
            "<circle class=\"end\" style=\"fill:var(--c{colour})\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>\
             <text class=\"tick strong\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            x + 9.0,
            y + 4.0,
            grouped(end.value, places)
        );
    }
    let stride = points.len().div_ceil(COLUMNS);
    let width = x(first + stride as f64) - x(first);
    for point in points.iter().step_by(stride) {
        let left = (x(point.step as f64) - width / 2.0).max(LEFT);
        frame.hit(&mut svg, left, width, &point.title);
    }
    frame.x_label(&mut svg, LEFT, "start", &format!("step {first}"));
    if last > first {
        frame.x_label(&mut svg, x(last), "end", &format!("step {last}"));
    }
    svg.push_str("</svg>");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_round_and_hold_every_value() {
        for (low, high) in [(0.0, 97.3), (2.13, 4.9), (0.0, 0.004), (3.0, 3.0), (0.0, 0.0)] {
            let frame = Frame::around(low, high, 200.0);
            assert!(frame.low <= low && frame.high >= high && frame.high > frame.low);
            let steps = (frame.high - frame.low) / frame.step;
            assert!((1.0..=6.5).contains(&steps), "{low}..{high}: {steps} steps");
        }
    }

    #[test]
    fn thinning_keeps_the_peak() {
        let mut totals = vec![1; 10_000];
        totals[4_321] = 9;
        let columns = thinned(&totals, totals.len());
        assert!(columns.len() == COLUMNS && columns.contains(&4_321));
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(grouped(1234567.891, 1), "1,234,567.9");
        assert_eq!(grouped(-0.5, 2), "−0.50");
    }
}
