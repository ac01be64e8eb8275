//! One thread issues for a device: its issuer is not shared, nor is a group of it.
use pp_transport::nccl::{Communicator, Issuer};

fn shared<T: Sync>(_: &T) {}

fn two_callers(issuer: &Issuer, group: &Communicator) {
    shared(issuer);
    shared(group);
}

fn main() {}
