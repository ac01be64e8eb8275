//! A receive is posted with the header that was checked and is next in order, and no other way.
use pp_contract::{Header, Matched};
use pp_transport::host::HostLink;
use pp_transport::link::Link;

fn unannounced(link: &mut HostLink, header: Header) {
    let _ = link.receive(&Matched { header, body: &[] });
}

fn unchecked(link: &mut HostLink, header: Header) {
    let _ = link.receive(&header);
}

fn main() {}
