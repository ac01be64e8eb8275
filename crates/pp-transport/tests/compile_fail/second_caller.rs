//! The end of an edge belongs to one thread: two cannot issue on it.
use pp_transport::edge::EdgeTx;
use pp_transport::host::HostTx;

fn two_callers(edge: &mut HostTx) {
    std::thread::scope(|scope| {
        scope.spawn(|| edge.try_lease());
        scope.spawn(|| edge.try_lease());
    });
}

fn main() {}
