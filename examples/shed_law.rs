//! Draws how the worker utilization shedder answers to load: `docs/shed-law.svg`, or the path that is
//! given.
//!
//! ```text
//! cargo run --features test-util --example shed_law
//! ```
//!
//! The shedder is the real one, on a clock that is moved by hand. How busy the instance is, is told to
//! it here, so what it sheds does not make the load any less, as it would in life.

use std::{
    env,
    error::Error,
    fmt::{self, Write},
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tollgate::{
    ManualClock, Priority,
    shed::{ShedderError, Utilization, WorkerShedder},
};

fn main() -> Result<(), Box<dyn Error>> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/shed-law.svg");
    let path = env::args().nth(1).unwrap_or_else(|| default.to_owned());
    let svg = draw(&run()?)?;
    fs::write(&path, &svg)?;
    println!("{path}: {} bytes", svg.len());
    Ok(())
}

// === what happens ===

const END_SECS: u64 = 720;

/// How busy the instance is, in percent: it goes from half to full load, stays there, and then has half
/// as much to do as would be good.
fn load_percent(secs: u64) -> u64 {
    match secs {
        0..60 => 50,
        60..110 => 50 + (secs - 60),
        110..290 => 100,
        290..355 => 100 - (secs - 290),
        _ => 35,
    }
}

/// What one could see of the shedder at some time.
struct Seen {
    secs: u64,
    utilization: f64,
    level: f64,
    admitted: [f64; 4],
}

const PRIORITIES: [Priority; 4] =
    [Priority::Critical, Priority::Write, Priority::Read, Priority::BestEffort];

fn run() -> Result<Vec<Seen>, ShedderError> {
    let clock = ManualClock::new();
    let percent = Arc::new(AtomicU64::new(0));
    let told = percent.clone();
    let shedder = WorkerShedder::builder("workers")
        .utilization(Utilization::from_fn(move || told.load(Relaxed) as f64 / 100.0))
        .clock(&clock)
        .build()?;
    let mut seen = Vec::new();
    for secs in 0..=END_SECS {
        percent.store(load_percent(secs), Relaxed);
        shedder.sample();
        seen.push(Seen {
            secs,
            utilization: shedder.utilization().unwrap_or(0.0),
            level: shedder.level(),
            admitted: PRIORITIES.map(|priority| shedder.admitted_share(priority)),
        });
        clock.advance(Duration::from_secs(1));
    }
    Ok(seen)
}

// === the picture ===

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 500.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 620.0;
const GREY: &str = "#777";
/// Critical requests, writes, reads, best effort.
const COLORS: [&str; 4] = ["#b3261e", "#8250df", "#0969da", "#1a7f37"];

/// A part of the picture with a vertical axis of its own.
struct Panel {
    title: &'static str,
    top: f64,
    bottom: f64,
    least: f64,
}

impl Panel {
    fn x(secs: u64) -> f64 {
        LEFT + (RIGHT - LEFT) * secs as f64 / END_SECS as f64
    }

    /// The axis ends at 1.
    fn y(&self, value: f64) -> f64 {
        self.bottom - (self.bottom - self.top) * (value - self.least) / (1.0 - self.least)
    }

    fn axes(&self, svg: &mut String, marks: &[f64]) -> fmt::Result {
        let Self { title, top, bottom, .. } = self;
        text(svg, LEFT, top - 14.0, "start", "#222", title)?;
        for &mark in marks {
            let y = self.y(mark);
            line(svg, (LEFT, y), (RIGHT, y), if mark == 0.0 { "#999" } else { "#ddd" })?;
            text(svg, LEFT - 8.0, y + 4.0, "end", GREY, &mark.to_string())?;
        }
        for secs in (0..=END_SECS).step_by(120) {
            let x = Self::x(secs);
            line(svg, (x, *top), (x, *bottom), "#eee")?;
            text(svg, x, bottom + 18.0, "middle", GREY, &format!("{secs} s"))?;
        }
        Ok(())
    }

    /// A line through all points, but for those in the middle of a straight part.
    fn curve(
        &self,
        svg: &mut String,
        seen: &[Seen],
        (color, dashes): (&str, &str),
        value: impl Fn(&Seen) -> f64,
    ) -> fmt::Result {
        let values: Vec<_> = seen.iter().map(|seen| (seen.secs, value(seen))).collect();
        let mut points = String::new();
        for (index, &(secs, here)) in values.iter().enumerate() {
            let is_straight = index > 0
                && values.get(index + 1).is_some_and(|(_, next)| {
                    (values[index - 1].1 + next - 2.0 * here).abs() < 1e-9
                });
            if !is_straight {
                write!(points, "{:.1},{:.1} ", Self::x(secs), self.y(here))?;
            }
        }
        writeln!(
            svg,
            r#"<polyline fill="none" stroke="{color}" stroke-width="2.5" stroke-dasharray="{dashes}" points="{}"/>"#,
            points.trim_end()
        )
    }
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), color: &str) -> fmt::Result {
    let ((x1, y1), (x2, y2)) = (from, to);
    writeln!(svg, r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{color}"/>"#)
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, color: &str, text: &str) -> fmt::Result {
    writeln!(
        svg,
        r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" fill="{color}">{text}</text>"#
    )
}

/// Writes a name beside the end of the curves, with a sample of its line.
fn legend(svg: &mut String, y: f64, (color, dashes): (&str, &str), name: &str) -> fmt::Result {
    let (from, to) = (RIGHT + 14.0, RIGHT + 38.0);
    writeln!(
        svg,
        r#"<path d="M{from} {y}H{to}" stroke="{color}" stroke-width="2.5" stroke-dasharray="{dashes}"/>"#
    )?;
    text(svg, to + 8.0, y + 4.0, "start", color, name)
}

fn draw(seen: &[Seen]) -> Result<String, fmt::Error> {
    let mut svg = String::new();
    writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" style="max-width:{WIDTH}px" role="img" aria-label="Utilization, shed level and admitted requests over time" font-family="sans-serif" font-size="13">"#
    )?;
    writeln!(svg, r##"<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>"##)?;

    let above =
        Panel { title: "utilization and shed level", top: 40.0, bottom: 240.0, least: -0.25 };
    above.axes(&mut svg, &[-0.25, 0.0, 0.25, 0.5, 0.75, 1.0])?;
    let (band_top, band_bottom) = (above.y(0.8), above.y(0.7));
    writeln!(
        svg,
        r##"<rect x="{LEFT}" y="{band_top:.1}" width="{:.1}" height="{:.1}" fill="#fff3c4"/>"##,
        RIGHT - LEFT,
        band_bottom - band_top
    )?;
    let (utilization, level) = (("#e08600", "6 4"), ("#222", "none"));
    above.curve(&mut svg, seen, utilization, |seen| seen.utilization)?;
    above.curve(&mut svg, seen, level, |seen| seen.level)?;
    legend(&mut svg, 60.0, utilization, "utilization")?;
    legend(&mut svg, 84.0, level, "shed level")?;
    text(&mut svg, RIGHT + 14.0, band_bottom, "start", GREY, "0.7 to 0.8: hold")?;

    let below = Panel { title: "share of requests let in", top: 310.0, bottom: 450.0, least: 0.0 };
    below.axes(&mut svg, &[0.0, 0.5, 1.0])?;
    for (index, (priority, color)) in PRIORITIES.iter().zip(COLORS).enumerate() {
        // Where curves lie on each other, those below show between the dashes of those above.
        let style = (color, ["none", "12 6", "8 6", "3 5"][index]);
        below.curve(&mut svg, seen, style, |seen| seen.admitted[index])?;
        legend(&mut svg, 320.0 + 24.0 * index as f64, style, &priority.to_string())?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}
