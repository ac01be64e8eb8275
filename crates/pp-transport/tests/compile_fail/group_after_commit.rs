//! A group is extended after it was issued.
use pp_device::Stream;
use pp_transport::nccl::{Group, GroupBuffer, Reduce};

fn late(mut group: Group<'_>, buffer: GroupBuffer, stream: &Stream) {
    let _flights = group.commit(stream);
    let _ = group.all_reduce(buffer, Reduce::Sum);
}

fn main() {}
