//! A buffer that a group owns is used before the group is committed.
use pp_transport::nccl::{Group, GroupBuffer, Reduce};

fn race(group: &mut Group<'_>, buffer: GroupBuffer) {
    let _ = group.all_reduce(buffer, Reduce::Sum);
    drop(buffer.into_memory());
}

fn main() {}
