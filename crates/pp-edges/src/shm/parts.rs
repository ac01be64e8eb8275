//! Work on many bytes, a part for each thread.

use std::panic::resume_unwind;
use std::thread::{Builder, available_parallelism, scope};

/// Most threads at once.
const MOST_THREADS: usize = 8;

/// Calls `work` with the offset and the length of parts that make up `len` bytes, each on a thread of its own; this thread
/// takes the first. There are at most 8, one for each core, and none but the last is shorter than `each`. They begin at
/// multiples of `unit` from the start. Where no thread is to be had, this thread does the work.
///
/// # Errors
/// The first error of a part.
pub(crate) fn in_parts<E: Send>(
    len: usize,
    (each, unit): (usize, usize),
    work: impl Fn(usize, usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    if len < 2 * each {
        return work(0, len);
    }
    let cores = available_parallelism().map_or(1, usize::from);
    let threads = (len / each).clamp(1, cores.min(MOST_THREADS));
    let part = len.div_ceil(threads).next_multiple_of(unit);
    let work = |at: usize| work(at, part.min(len - at));
    scope(|scope| {
        let aside = |at| {
            let thread = Builder::new().name("pp-part".into());
            thread.spawn_scoped(scope, move || work(at)).map_err(|_| at)
        };
        let others: Vec<_> = (part..len).step_by(part).map(aside).collect();
        let own = work(0);
        others.into_iter().fold(own, |before, other| {
            let result = match other {
                Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
                Err(at) => work(at),
            };
            before.and(result)
        })
    })
}

pub(super) fn round_to_pages(len: usize) -> usize {
    len.next_multiple_of(rustix::param::page_size())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn the_parts_are_the_whole() {
        for len in [0, 1, 4096, 100_000, 1 << 20] {
            let parts = Mutex::new(Vec::new());
            let note = |at, len| {
                parts.lock().unwrap().push((at, len));
                Ok::<_, ()>(())
            };
            in_parts(len, (1 << 16, 4096), note).unwrap();
            let mut parts = parts.into_inner().unwrap();
            parts.sort_unstable();
            let ends = parts.iter().scan(0, |end, (at, len)| {
                let follows = at == end;
                *end = at + len;
                follows.then_some(*end)
            });
            assert_eq!(ends.last(), Some(len), "{parts:?}");
        }
    }

    #[test]
    fn a_part_that_fails_fails_the_whole() {
        let last = |at, part| match at + part == 1 << 20 {
            true => Err(at),
            false => Ok(()),
        };
        assert!(in_parts(1 << 20, (1 << 16, 4096), last).is_err());
    }
}
