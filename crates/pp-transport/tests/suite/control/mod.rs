//! How ranks meet, what they say, and what strangers are told.

mod channel;
mod handshake;
mod hostile;
mod introduce;
mod launch;
mod rendezvous;
