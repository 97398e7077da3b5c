//! A rehearsal's clock: when each move and each tick's arithmetic would begin and end on hardware of a given [`Pace`].
//!
//! Every stream has a time. A move begins when its stream and what it waits for are done, and takes its bytes over the
//! stream's rate; the arithmetic of a tick takes the seconds that the trainer reckons with. So the time of a step
//! follows from the very moves and waits that the run will issue, and from nothing else.

use castor_kernels::{Mark, Stream};

/// What the hardware does per second, for [`crate::plan::Plan::make`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Bytes per second of each stream that moves them, by [`Stream::index`].
    pub bytes_per_s: [f64; Stream::ALL.len()],
    /// Of each stream that copies between device and host, bytes per second while the host's cores update states: both
    /// use the host's memory.
    pub beside_host_per_s: [f64; Stream::ALL.len()],
    /// Part of the time during which copies go on by which arithmetic beside them takes longer: both use the device's
    /// memory.
    pub contention: f64,
}

/// Seconds of one training step.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct StepTime {
    /// From its beginning to its end.
    pub step_s: f64,
    /// Of arithmetic, alone on the device.
    pub compute_s: f64,
    /// For which each stream moves bytes.
    pub busy_s: [f64; Stream::ALL.len()],
    /// For which arithmetic waits for each stream.
    pub waited_s: [f64; Stream::ALL.len()],
}

impl StepTime {
    /// The mean of several steps.
    pub fn mean(steps: &[StepTime]) -> StepTime {
        let count = steps.len().max(1) as f64;
        let mean = |value: &dyn Fn(&StepTime) -> f64| steps.iter().map(value).sum::<f64>() / count;
        StepTime {
            step_s: mean(&|step| step.step_s),
            compute_s: mean(&|step| step.compute_s),
            busy_s: std::array::from_fn(|stream| mean(&|step| step.busy_s[stream])),
            waited_s: std::array::from_fn(|stream| mean(&|step| step.waited_s[stream])),
        }
    }
}

/// Streams with times.
pub(crate) struct Timeline {
    pace: Pace,
    now: [f64; Stream::ALL.len()],
    /// When each mark is reached: index is its number.
    marks: [Vec<f64>; Stream::ALL.len()],
    /// Arithmetic of the present tick that did not begin yet: it begins when all that it uses is there.
    work_s: f64,
    step_began: f64,
    step: StepTime,
}

impl Timeline {
    pub(crate) fn new(pace: Pace) -> Timeline {
        let (now, marks) = ([0.0; Stream::ALL.len()], std::array::from_fn(|_| vec![0.0]));
        Timeline { pace, now, marks, work_s: 0.0, step_began: 0.0, step: StepTime::default() }
    }

    /// The arithmetic of a tick, of which the leases come next.
    pub(crate) fn work(&mut self, seconds: f64) {
        self.compute();
        self.work_s = seconds;
    }

    /// What was to be computed is, beside the copies that go on.
    fn compute(&mut self) {
        if self.work_s > 0.0 {
            let now = self.now[Stream::Compute.index()];
            let copying = [Stream::HostToDevice, Stream::DeviceToHost].map(|stream| self.now[stream.index()] - now);
            let beside = copying[0].max(copying[1]).clamp(0.0, self.work_s);
            self.now[Stream::Compute.index()] += self.work_s + beside * self.pace.contention;
            self.step.compute_s += self.work_s;
            self.work_s = 0.0;
        }
    }

    /// A mark was made.
    pub(crate) fn mark(&mut self, mark: Mark) {
        if mark.stream == Stream::Compute {
            self.compute();
        }
        let now = self.now[mark.stream.index()];
        let marks = &mut self.marks[mark.stream.index()];
        marks.resize((mark.number as usize + 1).max(marks.len()), now);
        marks[mark.number as usize] = now;
    }

    /// `stream` waits for `mark`.
    pub(crate) fn wait(&mut self, stream: Stream, mark: Mark) {
        let reached = self.marks[mark.stream.index()].get(mark.number as usize).copied().unwrap_or(0.0);
        let now = &mut self.now[stream.index()];
        if reached > *now {
            if stream == Stream::Compute {
                self.step.waited_s[mark.stream.index()] += reached - *now;
            }
            *now = reached;
        }
    }

    /// `stream` moves `bytes`.
    pub(crate) fn moves(&mut self, stream: Stream, bytes: u64) {
        let (rate, bytes) = (self.pace.bytes_per_s[stream.index()], bytes as f64);
        let seconds = match stream {
            Stream::HostToDevice | Stream::DeviceToHost => {
                let slower = self.pace.beside_host_per_s[stream.index()];
                let beside_s = (self.now[Stream::Host.index()] - self.now[stream.index()]).clamp(0.0, bytes / slower);
                beside_s + (bytes - beside_s * slower) / rate
            }
            _ => bytes / rate,
        };
        self.now[stream.index()] += seconds;
        self.step.busy_s[stream.index()] += seconds;
    }

    /// A step is over; its times.
    pub(crate) fn end_step(&mut self) -> StepTime {
        self.compute();
        let now = self.now[Stream::Compute.index()];
        let step = StepTime { step_s: now - self.step_began, ..self.step };
        (self.step_began, self.step) = (now, StepTime::default());
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two copies of a second each, the second of which is computed with for a second behind the first.
    #[test]
    fn arithmetic_waits_for_what_it_uses_and_moves_go_on_beside_it() {
        let bytes_per_s = [100.0; Stream::ALL.len()];
        let pace = Pace { bytes_per_s, beside_host_per_s: [50.0; Stream::ALL.len()], contention: 0.5 };
        let mut line = Timeline::new(pace);
        let at = |number| Mark { stream: Stream::HostToDevice, number };
        for number in 1..=2 {
            line.moves(Stream::HostToDevice, 100);
            line.mark(at(number));
        }
        for number in 1..=2 {
            line.work(1.0);
            line.wait(Stream::Compute, at(number));
            line.mark(Mark { stream: Stream::Compute, number });
        }
        // 1 s of waiting, 1 s of computing that half of a second of copying makes longer, 1 s alone.
        let step = line.end_step();
        assert_eq!((step.step_s, step.compute_s), (3.5, 2.0));
        assert_eq!(step.waited_s[Stream::HostToDevice.index()], 1.0);
        assert_eq!(step.busy_s[Stream::HostToDevice.index()], 2.0);
        assert_eq!(line.end_step(), StepTime::default());
        // The host's cores work for a second, in which a copy moves 50 bytes; the other 50 take half a second.
        let began = line.now[Stream::HostToDevice.index()];
        line.now[Stream::Host.index()] = began;
        line.moves(Stream::Host, 100);
        line.moves(Stream::HostToDevice, 100);
        assert_eq!(line.now[Stream::HostToDevice.index()], began + 1.5);
    }
}
