//! Ranks that run a stage together.
//!
//! The leader tells the others which chunk it begins. On the host a collective blocks a member until all are inside: then it
//! does nothing else. On a device it is done once all members have begun it; on one that does one thing at a time, once it
//! is what all of them do next. After a loss it is aborted.

use pp_contract::pipeline::{EdgeKind, EdgeSpec};
use pp_runtime::core::{Membership, Ticket, Wire};

use super::{Map, Message, Operation, Pool, Working, World, hold};

impl Map {
    /// The place on a rank of a stage of the pipeline.
    pub(super) fn place(&self, rank: usize, at: usize) -> usize {
        let place = self.places[rank].iter().position(|place| place.at == at);
        place.expect("the stage stands on the rank")
    }

    pub(super) fn is_group(&self, rank: usize, stage: usize) -> bool {
        self.places[rank][stage].membership != Membership::Alone
    }

    /// The edges of this kind in the group of a stage.
    fn edges_in(&self, kind: EdgeKind, at: usize) -> impl Iterator<Item = usize> {
        let edges = self.edges.iter().enumerate();
        let is_it = move |(_, edge): &(_, &EdgeSpec)| (edge.kind, edge.from) == (kind, at);
        edges.filter(is_it).map(|(number, _)| number)
    }

    /// Ranks, and the places of the stage there.
    fn members(&self, at: usize) -> impl Iterator<Item = (usize, usize)> {
        let ranks = self.shape.pipeline.stages()[at].ranks.iter();
        let ranks = ranks.map(|rank| rank.get() as usize);
        ranks.map(move |rank| (rank, self.place(rank, at)))
    }
}

impl World {
    /// Says whether a rank may take in what is on an edge. Receives are issued behind the collectives that other ranks began
    /// before the payload was sent.
    pub(super) fn may_hear(&self, map: &Map, edge: usize) -> bool {
        let (rank, ..) = map.target(edge);
        if self.at(rank).inside.is_some() {
            return false;
        }
        let told = (0..self.lanes.len()).filter(|told| {
            map.edges[*told].kind == EdgeKind::Follow && map.target(*told).0 == rank
        });
        let mut told = told.map(|told| self.lanes[told].queue.is_empty());
        !map.has_payloads(edge) || told.all(|is_empty| is_empty) && !self.at(rank).core.is_told()
    }

    /// A member begins with a chunk, the leader before the others.
    pub(super) fn begin_together(&mut self, map: &Map, (rank, stage): (usize, usize), of: Message) {
        let at = map.places[rank][stage].at;
        let chunk = (of.chunk, of.attempt);
        for edge in map.edges_in(EdgeKind::Follow, at) {
            let (member, _, _) = map.target(edge);
            let follows = map.places[rank][stage].follows();
            if !follows {
                let slot = Pool::None;
                self.push(edge, Message { slot, ..of });
                self.lanes[edge].begun.push_back(chunk);
            } else if member == rank {
                let begun = self.lanes[edge].begun.pop_front();
                hold(
                    begun == Some(chunk),
                    "each member runs what its leader has begun, once and in order",
                    || format!("rank {rank} ran {chunk:?}, {begun:?} was due"),
                );
            }
        }
    }

    /// On the host all members leave a collective when the last is inside.
    pub(super) fn enter(
        &mut self,
        map: &Map,
        rank: usize,
        (stage, ticket, work): (usize, Ticket, Working),
    ) {
        self.node(rank).inside = Some((stage, ticket, work));
        let at = map.places[rank][stage].at;
        let same = (ticket.chunk, ticket.attempt);
        let is_inside = |(member, place): (usize, usize)| {
            let inside = self.ranks[member]
                .as_ref()
                .and_then(|member| member.node.inside);
            inside.is_some_and(|(stage, ticket, _)| {
                stage == place && (ticket.chunk, ticket.attempt) == same
            })
        };
        if !map.members(at).all(is_inside) {
            return;
        }
        for (member, stage) in map.members(at) {
            if let Some((_, ticket, work)) = self.node(member).inside.take() {
                self.node(member).core.handle_working(stage, ticket, work);
                self.finish_work(map, member, stage);
            }
        }
    }

    /// A collective returns with an error, and the device goes on behind it.
    pub(super) fn leave_group(&mut self, map: &Map, rank: usize) {
        if self.is_alone(rank) {
            let is_of_group = |issued: &Operation| matches!(issued, Operation::Work(stage) if map.is_group(rank, *stage));
            let issued = &mut self.node(rank).operations;
            issued.retain(|issued| !is_of_group(issued));
        }
        if let Some((_, _, work)) = self.node(rank).inside.take() {
            self.release(map, rank, work.message);
            self.free(rank, work.output);
        }
    }

    /// The chunk of a stage that a device works on: that which began first.
    fn oldest_work(&self, rank: usize, stage: usize) -> Option<Message> {
        let mut working = self.at(rank).core.working(stage);
        working.find(|work| !work.is_done).map(|work| work.message)
    }

    fn is_aborted(&self, rank: usize, work: Message) -> bool {
        work.attempt < self.at(rank).core.attempt()
    }

    /// Says whether the work that began first may be done.
    pub(super) fn may_finish(&self, map: &Map, rank: usize, stage: usize) -> bool {
        let Some(work) = self.oldest_work(rank, stage) else {
            return false;
        };
        let chunk = (work.chunk, work.attempt);
        let mut edges = map.edges_in(EdgeKind::Follow, map.places[rank][stage].at);
        self.is_aborted(rank, work) || edges.all(|edge| !self.lanes[edge].begun.contains(&chunk))
    }

    /// Says whether the device can do what was issued first.
    pub(super) fn may_operate(&self, map: &Map, rank: usize) -> bool {
        match self.at(rank).operations.front() {
            Some(Operation::Receive(transfer)) => self.sent.contains(transfer),
            Some(Operation::Work(stage)) if map.is_group(rank, *stage) => {
                let work = self.oldest_work(rank, *stage);
                // The step is that of the leader.
                let is_leader = !map.places[rank][*stage].follows();
                let is_aborted = work.is_some_and(|work| self.is_aborted(rank, work));
                let mut members = map.members(map.places[rank][*stage].at);
                let is_next = |(member, place): (usize, usize)| {
                    self.lives(member)
                        && self.at(member).operations.front() == Some(&Operation::Work(place))
                        && self
                            .oldest_work(member, place)
                            .map(|work| (work.chunk, work.attempt))
                            == work.map(|work| (work.chunk, work.attempt))
                };
                is_aborted || is_leader && members.all(is_next)
            }
            first => first.is_some(),
        }
    }

    pub(super) fn operate(&mut self, map: &Map, rank: usize) {
        match self.at(rank).operations.front().copied() {
            Some(Operation::Work(stage)) if map.is_group(rank, stage) => {
                let work = self.oldest_work(rank, stage);
                match work.is_some_and(|work| self.is_aborted(rank, work)) {
                    true => self.operate_one(map, rank),
                    false => {
                        for (member, _) in map.members(map.places[rank][stage].at) {
                            self.operate_one(map, member);
                        }
                    }
                }
            }
            _ => self.operate_one(map, rank),
        }
    }

    /// The work of a stage that began first is done.
    pub(super) fn finish_work(&mut self, map: &Map, rank: usize, stage: usize) {
        let mut all = Vec::new();
        while let Some(work) = self.node(rank).core.take_working(stage) {
            all.push(work);
        }
        let oldest = all.iter_mut().find(|(_, work)| !work.is_done);
        let message = oldest.map(|(_, work)| {
            work.is_done = true;
            work.message
        });
        for (ticket, work) in all {
            self.node(rank).core.handle_working(stage, ticket, work);
        }
        self.release(map, rank, message.expect("the stage works"));
        self.conclude_done(map, rank, stage);
    }

    /// What is done goes on, that of a leader once all members have reported.
    pub(super) fn conclude_done(&mut self, map: &Map, rank: usize, stage: usize) {
        while let Some((ticket, work)) = self.node(rank).core.take_working(stage) {
            let is_awaited = self.node(rank).core.is_current(&ticket);
            let reports = self.reports_on(map, rank, stage);
            if !work.is_done || is_awaited && reports.contains(&None) {
                self.node(rank)
                    .core
                    .handle_still_working(stage, ticket, work);
                return;
            }
            if is_awaited {
                for report in reports.into_iter().flatten() {
                    let (_, chunk, attempt) = report;
                    hold(
                        (chunk, attempt) == (ticket.chunk.get(), ticket.attempt),
                        "reports come in the order of the chunks",
                        || format!("{report:?} for {ticket:?}"),
                    );
                    let mut all = self.node(rank).reports.iter();
                    let at = all.position(|other| *other == report);
                    self.node(rank).reports.remove(at.expect("just seen"));
                }
            }
            self.conclude(map, (rank, stage), ticket, work);
        }
    }

    /// As the driver looks at all its stages.
    pub(super) fn conclude_all(&mut self, map: &Map, rank: usize) {
        for stage in 0..map.places[rank].len() {
            self.conclude_done(map, rank, stage);
        }
    }

    /// The oldest report of each other member to a leader.
    fn reports_on(&self, map: &Map, rank: usize, stage: usize) -> Vec<Option<(usize, u64, u16)>> {
        if map.places[rank][stage].followers() == 0 {
            return Vec::new();
        }
        let edges = map.edges_in(EdgeKind::Report, map.places[rank][stage].at);
        let oldest = |edge| {
            let mut reports = self.at(rank).reports.iter();
            reports.find(|(from, ..)| *from == edge).copied()
        };
        edges.map(oldest).collect()
    }

    /// Edges over which a stage says that nothing more comes.
    pub(super) fn closes(&self, map: &Map, rank: usize, stage: usize) -> Vec<usize> {
        let place = map.places[rank][stage];
        let outputs = place.outputs.into_iter().filter_map(|wire| match wire {
            Wire::Edge(edge) => Some(edge),
            _ => None,
        });
        let followers = map.edges_in(EdgeKind::Follow, place.at);
        let followers = followers.filter(|_| place.followers() > 0);
        outputs.chain(followers).collect()
    }
}
