//! A link belongs to one thread: two cannot issue on it.
use pp_transport::host::HostLink;
use pp_transport::link::Link;

fn two_callers(link: &mut HostLink) {
    std::thread::scope(|scope| {
        scope.spawn(|| link.try_lease());
        scope.spawn(|| link.try_lease());
    });
}

fn main() {}
