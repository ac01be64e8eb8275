//! One suite that every backend runs: what its edges must do.
//!
//! A backend joins by implementing [`suite::Backend`] and naming itself in [`conformance!`].

#[path = "../control_support/mod.rs"]
mod control_support;
mod cuda;
mod devices;
#[path = "../edges_support/mod.rs"]
mod edges_support;
mod gpu_link;
mod gpu_suite;
mod host;
mod nccl_faults;
mod nccl_generations;
mod nccl_link;
mod p2p;
mod suite;
mod through_host;
#[path = "../two_way/mod.rs"]
mod two_way;

macro_rules! conformance {
    ($backend:ty: $($claim:ident)+) => {
        $(
            #[test]
            fn $claim() {
                $crate::suite::$claim::<$backend>();
            }
        )+
    };
    ($backend:ty) => {
        $crate::conformance!($backend:
            messages_arrive_whole_and_in_order
            there_are_as_many_leases_as_slots
            backpressure_ends_when_the_receiver_lets_go
            payloads_of_every_size_arrive
            a_large_payload_arrives
            a_dropped_lease_is_free_again
            a_send_dropped_in_flight_keeps_its_slot_until_read
            a_forgotten_send_is_leaked_not_reused
            a_poisoned_slot_is_never_used_again
            a_refused_send_returns_its_buffer_and_uses_no_number
            a_receive_needs_an_announced_payload
            leases_outlive_their_link
            a_peer_may_vanish_at_every_step
        );
    };
}
pub(crate) use conformance;
