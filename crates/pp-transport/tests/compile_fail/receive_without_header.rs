//! A receive is posted with the witness that its header was checked and is next in order, and
//! with nothing else. (That the witness cannot be made up is tested in pp-contract.)
use pp_contract::Header;
use pp_transport::host::HostLink;
use pp_transport::link::Link;

fn unchecked(link: &mut HostLink, header: Header) {
    let _ = link.receive(&header);
}

fn main() {}
