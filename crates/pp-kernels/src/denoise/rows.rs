//! How the members of a group share a frame: by rows of tokens, plane by plane.
//!
//! A member computes its *own* rows of each plane and *holds* what its kernels read for them: [`HALO`] rows on each side.
//! It runs the kernels on a [`Geometry`] of the rows that it holds, as if these were whole planes. What the kernels make
//! of a held row that is not the member's own is wrong and never used.
//!
//! The leader, member 0, holds its rows where they lie in the payload. To every other member it sends the rows that this
//! one holds. After a pass that another one follows, members exchange the rows of the guide that the others hold. At the
//! end each sends its rows back. The frames that a session remembers and `context_frames` are cut in the same way, since
//! the kernels read them in the same rows.

use std::ops::Range;

use pp_contract::{DType, Manifest};

use super::geometry::{Geometry, PATCH, TOKEN};
use super::settings::RADIUS;

/// Rows of tokens on each side of its own that a member reads in a pass.
///
/// Patches begin at every half token. So a sample lies in patches that reach up to half a token above and below its own
/// cell, and each of them is compared with patches that are shifted by up to the radius.
pub(crate) const HALO: usize = (PATCH / 2 + RADIUS[0]).div_ceil(PATCH);

/// The rows of tokens of one plane that a member has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlaneRows {
    /// Those that it computes; there may be none.
    pub(crate) own: Range<usize>,
    /// Those that it holds. A member without rows of its own holds one, so that no plane is empty.
    pub(crate) held: Range<usize>,
}

/// What one member has of every plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) planes: Vec<PlaneRows>,
    /// Where the held rows lie in the member's tensors.
    pub(crate) geometry: Geometry,
}

impl Rows {
    /// The place of a row of tokens among the tokens of a frame.
    fn token(&self, plane: usize, row: usize) -> usize {
        let geometry = &self.geometry.planes[plane];
        geometry.first_token + (row - self.planes[plane].held.start) * geometry.tokens_x()
    }
}

/// A copy of `count` times `bytes` bytes, from one memory to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) from: usize,
    pub(crate) from_pitch: usize,
    pub(crate) to: usize,
    pub(crate) to_pitch: usize,
    pub(crate) bytes: usize,
    pub(crate) count: usize,
}

impl Move {
    /// Makes the copy in host memory.
    pub(crate) fn apply(&self, from: &[u8], to: &mut [u8]) {
        for index in 0..self.count {
            let from = &from[self.from + index * self.from_pitch..][..self.bytes];
            to[self.to + index * self.to_pitch..][..self.bytes].copy_from_slice(from);
        }
    }
}

/// A row of tokens of one plane, in the whole frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) plane: usize,
    pub(crate) row: usize,
}

/// Who has which rows, as one member sees it.
#[derive(Debug)]
pub(crate) struct RowShares {
    full: Geometry,
    members: Vec<Rows>,
    own: usize,
    /// Those that this member exchanges rows with, in the order in which it does.
    neighbours: Vec<usize>,
}

impl RowShares {
    /// Cuts frames for so many members, of which `own` is this one. The kernels of a member give the bytes of the whole
    /// plane where its first row is a multiple of `step`.
    pub(crate) fn new(full: &Geometry, members: u32, own: u32, step: usize) -> RowShares {
        let members = members as usize;
        let mut planes = vec![Vec::new(); members];
        // Tokens of the planes so far, and those of them in front of each cut.
        let (mut total, mut given) = (0, vec![0; members]);
        for plane in &full.planes {
            let (width, height) = (plane.tokens_x(), plane.tokens_y());
            total += plane.tokens();
            let mut start = 0;
            for (member, planes) in planes.iter_mut().enumerate() {
                let end = match member + 1 {
                    last if last == members => height,
                    next => {
                        let wanted = (next * total / members).saturating_sub(given[next]);
                        let end = nearest(wanted, width, step).clamp(start, height);
                        given[next] += end * width;
                        end
                    }
                };
                planes.push(rows(start..end, height, step));
                start = end;
            }
        }
        let members: Vec<Rows> = (0..)
            .zip(planes)
            .map(|(member, planes)| Rows {
                geometry: held(full, &planes, member == 0),
                planes,
            })
            .collect();
        let mut cut = RowShares {
            full: full.clone(),
            members,
            own: own as usize,
            neighbours: Vec::new(),
        };
        cut.neighbours = cut.exchanges(cut.own);
        cut
    }

    /// The rows of this member.
    pub(crate) fn own(&self) -> &Rows {
        &self.members[self.own]
    }

    /// All members but the leader, and their rows.
    pub(crate) fn followers(&self) -> impl Iterator<Item = (usize, &Rows)> {
        self.members.iter().enumerate().skip(1)
    }

    /// Those that this member exchanges rows with, in order, and whether this one sends first. No two wait for each
    /// other: all members go through the pairs in one order, in which every second pair of neighbours comes first.
    pub(crate) fn neighbours(&self) -> impl Iterator<Item = (usize, bool)> {
        self.neighbours
            .iter()
            .map(|other| (*other, self.own < *other))
    }

    fn exchanges(&self, own: usize) -> Vec<usize> {
        let others = (0..self.members.len()).filter(|other| *other != own);
        let mut others: Vec<usize> = others
            .filter(|other| self.sent(own, *other).chain(self.sent(*other, own)).count() > 0)
            .collect();
        others.sort_by_key(|other| {
            let (low, high) = (own.min(*other), own.max(*other));
            (low % 2, low, high)
        });
        others
    }

    /// The rows that this member sends to another one after a pass.
    pub(crate) fn given(&self, to: usize) -> impl Iterator<Item = Row> {
        self.sent(self.own, to)
    }

    /// The rows that this member gets from another one.
    pub(crate) fn got(&self, from: usize) -> impl Iterator<Item = Row> {
        self.sent(from, self.own)
    }

    /// The rows of `from` that `to` reads beside its own.
    fn sent(&self, from: usize, to: usize) -> impl Iterator<Item = Row> {
        let (from, to) = (&self.members[from], &self.members[to]);
        let planes = from.planes.iter().zip(&to.planes).enumerate();
        planes.flat_map(|(plane, (from, to))| {
            let (start, end) = (to.own.start, to.own.end);
            let around = (start.saturating_sub(HALO)..start).chain(end..end + HALO);
            let (is_there, has) = (!to.own.is_empty(), from.own.clone());
            around
                .filter(move |row| is_there && has.contains(row))
                .map(move |row| Row { plane, row })
        })
    }

    /// Bytes of a message with these rows, which lie one behind the other, each of all frames.
    pub(crate) fn message_bytes(
        &self,
        rows: impl Iterator<Item = Row>,
        frames: usize,
        dtype: DType,
    ) -> usize {
        let tokens = rows.map(|row| self.full.planes[row.plane].tokens_x());
        tokens.sum::<usize>() * frames * token_bytes(dtype)
    }

    /// The copies between a message with these rows and the tokens that this member holds.
    pub(crate) fn in_message(
        &self,
        rows: impl Iterator<Item = Row>,
        frames: usize,
        dtype: DType,
        is_sent: bool,
    ) -> impl Iterator<Item = Move> {
        let (token, own) = (token_bytes(dtype), self.own());
        let mut place = 0;
        rows.map(move |Row { plane, row }| {
            let bytes = own.geometry.planes[plane].tokens_x() * token;
            let (held, pitch) = (own.token(plane, row) * token, own.geometry.tokens * token);
            let message = place;
            place += bytes * frames;
            let (from, from_pitch, to, to_pitch) = match is_sent {
                true => (held, pitch, message, bytes),
                false => (message, bytes, held, pitch),
            };
            Move {
                from,
                from_pitch,
                to,
                to_pitch,
                bytes,
                count: frames,
            }
        })
    }

    /// The copies that make the payload `part` of a member, at `start`, from the leader's `whole`: the tensor to copy
    /// from, and the copy.
    pub(crate) fn scattered<'a>(
        &'a self,
        member: usize,
        whole: &'a Manifest,
        part: &'a Manifest,
        start: usize,
    ) -> impl Iterator<Item = (&'a str, Move)> {
        let rows = &self.members[member];
        part.iter().flat_map(move |(offset, spec)| {
            let to = start + offset as usize;
            let mut moves = Vec::new();
            match (spec.shape().dims(), whole.get(spec.name())) {
                // Tokens of frames.
                ([frames, _, _], _) => {
                    let token = token_bytes(spec.dtype());
                    for (plane, of) in rows.planes.iter().enumerate() {
                        let geometry = &self.full.planes[plane];
                        let first = geometry.first_token + of.held.start * geometry.tokens_x();
                        moves.push(Move {
                            from: first * token,
                            from_pitch: self.full.tokens * token,
                            to: to + rows.token(plane, of.held.start) * token,
                            to_pitch: rows.geometry.tokens * token,
                            bytes: of.held.len() * geometry.tokens_x() * token,
                            count: *frames as usize,
                        });
                    }
                }
                (_, Some((_, whole))) => {
                    let bytes = whole.bytes() as usize;
                    moves.push(Move {
                        from: 0,
                        from_pitch: bytes,
                        to,
                        to_pitch: bytes,
                        bytes,
                        count: usize::from(bytes > 0),
                    });
                }
                _ => {}
            }
            moves.into_iter().map(|one| (spec.name(), one))
        })
    }

    /// The copies that put a member's own rows of its result, which begins at `start`, into the leader's.
    pub(crate) fn gathered(
        &self,
        member: usize,
        frames: usize,
        dtype: DType,
        start: usize,
    ) -> impl Iterator<Item = Move> {
        let (rows, token) = (&self.members[member], token_bytes(dtype));
        let planes = rows.planes.iter().enumerate();
        planes
            .filter(|(_, of)| !of.own.is_empty())
            .map(move |(plane, of)| {
                let geometry = &self.full.planes[plane];
                let first = geometry.first_token + of.own.start * geometry.tokens_x();
                Move {
                    from: start + rows.token(plane, of.own.start) * token,
                    from_pitch: rows.geometry.tokens * token,
                    to: first * token,
                    to_pitch: self.full.tokens * token,
                    bytes: of.own.len() * geometry.tokens_x() * token,
                    count: frames,
                }
            })
    }
}

/// Bytes of a token.
fn token_bytes(dtype: DType) -> usize {
    TOKEN * dtype.size_bytes() as usize
}

/// The number of rows, of `width` tokens, that is nearest to so many tokens. Behind it begins a member whose halo begins
/// at a multiple of `step`.
fn nearest(tokens: usize, width: usize, step: usize) -> usize {
    let rows = (tokens + width / 2) / width;
    match rows.checked_sub(HALO) {
        Some(behind) => (behind + step / 2) / step * step + HALO,
        None => rows,
    }
}

/// What a member with these rows of a plane holds.
fn rows(own: Range<usize>, height: usize, step: usize) -> PlaneRows {
    let held = match own.is_empty() {
        true => 0..1,
        false => {
            let first = own.start.saturating_sub(HALO);
            first / step * step..(own.end + HALO).min(height)
        }
    };
    PlaneRows { own, held }
}

/// Where the held rows of a member lie: those of the leader in the whole frame, those of the others without gaps.
fn held(full: &Geometry, planes: &[PlaneRows], is_leader: bool) -> Geometry {
    let mut geometry = full.clone();
    let mut tokens = 0;
    for (plane, rows) in geometry.planes.iter_mut().zip(planes) {
        // Below the plane lies what its last row of tokens was padded with.
        plane.height = plane.height.min(rows.held.end * PATCH) - rows.held.start * PATCH;
        if !is_leader {
            plane.first_token = tokens;
        }
        tokens += plane.tokens();
    }
    if !is_leader {
        geometry.tokens = tokens;
    }
    geometry
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Chroma;

    fn cuts(geometry: &Geometry, members: u32, step: usize) -> Vec<RowShares> {
        (0..members)
            .map(|own| RowShares::new(geometry, members, own, step))
            .collect()
    }

    #[test]
    fn every_row_is_computed_once_and_every_row_beside_ones_own_comes_from_who_computes_it() {
        for (width, height) in [(16, 16), (37, 43), (24, 405), (1920, 1080)] {
            for chroma in Chroma::ALL {
                let full = Geometry::new(width, height, chroma);
                for (members, step) in [(2, 1), (3, 1), (5, 1), (2, 23), (3, 23), (64, 23)] {
                    let cuts = cuts(&full, members, step);
                    for (plane, of) in full.planes.iter().enumerate() {
                        let mut next = 0;
                        for cut in &cuts {
                            let rows = &cut.own().planes[plane];
                            let (own, held) = (rows.own.clone(), rows.held.clone());
                            assert_eq!(own.start, next);
                            next = own.end;
                            assert_eq!(held.start % step, 0);
                            assert!(!held.is_empty() && held.end <= of.tokens_y());
                            assert_eq!(cut.own().geometry.planes[plane].tokens_y(), held.len());
                            let mut got: Vec<usize> = (0..members as usize)
                                .filter(|other| *other != cut.own)
                                .flat_map(|other| cut.got(other))
                                .filter(|row| row.plane == plane)
                                .map(|row| row.row)
                                .collect();
                            got.sort_unstable();
                            let around =
                                own.start.saturating_sub(1)..(own.end + 1).min(of.tokens_y());
                            let beside = around.filter(|row| !own.is_empty() && !own.contains(row));
                            assert_eq!(got, beside.collect::<Vec<_>>());
                            assert!(got.iter().all(|row| held.contains(row)));
                        }
                        assert_eq!(next, of.tokens_y());
                    }
                }
            }
        }
    }

    /// Every member takes the first pair that both have come to, until none is left: no two wait for each other.
    #[test]
    fn members_that_exchange_rows_meet() {
        for members in 2..9 {
            for height in [16, 37, 72, 405] {
                let cuts = cuts(&Geometry::new(16, height, Chroma::C420), members, 1);
                let mut left: Vec<Vec<(usize, bool)>> =
                    cuts.iter().map(|cut| cut.neighbours().collect()).collect();
                while let Some(own) = (0..left.len()).find(|own| {
                    let first = left[*own].first();
                    first.is_some_and(|(other, _)| {
                        left[*other].first().map(|(o, _)| *o) == Some(*own)
                    })
                }) {
                    let (other, sends_first) = left[own].remove(0);
                    let (_, other_first) = left[other].remove(0);
                    assert_ne!(sends_first, other_first);
                    assert_eq!(
                        cuts[own].given(other).collect::<Vec<_>>(),
                        cuts[other].got(own).collect::<Vec<_>>()
                    );
                }
                assert!(
                    left.iter().all(Vec::is_empty),
                    "{members} members, {height} rows"
                );
            }
        }
    }

    #[test]
    fn two_members_share_1080p_in_halves_that_begin_with_a_tile() {
        let full = Geometry::new(1920, 1080, Chroma::C420);
        let cut = RowShares::new(&full, 2, 1, 23);
        let own: Vec<_> = cut
            .own()
            .planes
            .iter()
            .map(|plane| plane.own.clone())
            .collect();
        assert_eq!(own, [70..135, 24..68, 47..68]);
        let held: Vec<_> = cut
            .own()
            .planes
            .iter()
            .map(|plane| plane.held.start)
            .collect();
        assert_eq!(held, [69, 23, 46]);
        let tokens: usize = full
            .planes
            .iter()
            .zip(own)
            .map(|(plane, own)| own.len() * plane.tokens_x())
            .sum();
        assert!(
            (0.47..0.53).contains(&(tokens as f64 / full.tokens as f64)),
            "{tokens}"
        );
    }
}
