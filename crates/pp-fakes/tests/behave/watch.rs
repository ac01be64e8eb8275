//! With `PP_FAKE_WATCH` a recording shows which numbers hosts have seen, and the checker goes by them.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use pp_testing::Folder;
use rustix::mm::munmap;

use super::{alone, device};
use crate::peers::{new_page, page_of, torn, wait_for, words_of};
use pp_fakes::check::{Expect, Recording, Rule, check};
use pp_fakes::ok;

/// Runs a child of this file, and gives what it recorded.
fn recorded(child: &str, faults: &str) -> Vec<Recording> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = Folder::new(env!("CARGO_TARGET_TMPDIR"), &format!("watch-{next}"));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", child, "--ignored", "--nocapture"])
        .env("PP_FAKE_RECORD", folder.path())
        .env("PP_FAKE_WATCH", "1");
    // The faults begin where the child says so.
    command.env("PP_TEST_FAULTS", faults);
    let ended = command.output().unwrap();
    assert!(
        ended.status.success(),
        "{}",
        String::from_utf8_lossy(&ended.stderr)
    );
    Recording::read_all(folder.path())
}

#[test]
#[ignore = "the process that the other tests start"]
fn child_that_reads_and_writes_words() {
    let (_alone, stream) = (alone(), device(0));
    let (words, at) = page_of(&new_page());
    let word = |n: usize| std::hint::black_box(&words[n]);
    assert_eq!(word(0).load(Ordering::Relaxed), 0);
    ok!(write_word(stream, at, 3, 0));
    wait_for(word(0), 3);
    ok!(stream_synchronize(stream));
    word(1).store(9, Ordering::Release);
    assert_eq!(word(1).swap(5, Ordering::AcqRel), 9);
    assert_eq!(word(1).fetch_add(2, Ordering::AcqRel), 5);
    let exchanged = word(1).compare_exchange(7, 8, Ordering::AcqRel, Ordering::Relaxed);
    assert_eq!(exchanged, Ok(7));
    assert_eq!(word(1).load(Ordering::SeqCst), 8);
    let sum: u32 = (0..1024).map(|n| word(n).load(Ordering::Acquire)).sum();
    assert_eq!(sum, 11);
}

#[test]
fn what_a_host_sees_is_recorded_once() {
    let recordings = recorded("watch::child_that_reads_and_writes_words", "");
    let lines = &recordings[0].lines;
    let page = lines.iter().find(|line| line.name == "cuMemHostRegister");
    let page = page.unwrap().number("addr").unwrap();
    let said = |name: &str, word: u64| -> Vec<u64> {
        let these = lines.iter().filter(|line| line.name == name);
        let these = these.filter(|line| line.number("addr") == Some(page + word * 4));
        these.map(|line| line.number("value").unwrap()).collect()
    };
    assert_eq!(said("HostLoad", 0), [0, 3]);
    assert_eq!(said("HostStore", 1), [9, 5, 7, 8]);
    // It saw there what it wrote itself.
    assert!(said("HostLoad", 1).is_empty());
    assert_eq!(said("HostLoad", 1023), [0]);
}

#[test]
#[ignore = "the process that the other tests start"]
fn child_that_has_a_page_twice() {
    let (_alone, loaded) = alone();
    loaded.set("WATCH", "2");
    device(0);
    let page = new_page();
    let (other, (words, _)) = (words_of(&page), page_of(&page));
    other[0].store(7, Ordering::Release);
    wait_for(&words[0], 7);
    let (bytes, page) = (vec![3u8; 400], std::ptr::from_ref(other));
    // SAFETY: the bytes lie in the page, which nobody else uses meanwhile.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), page.cast_mut().cast(), 400) }
    assert_eq!(words[99].load(Ordering::Acquire), 0x0303_0303);
    other[0].store(8, Ordering::Release);
    wait_for(&words[0], 8);
    let page = std::ptr::from_ref(words).cast_mut().cast();
    // SAFETY: nothing uses `words` from here on.
    unsafe { munmap(page, 4096) }.unwrap();
    ok!(unregister(page));
}

/// A rank without a device is a thread that has another mapping. A page of bytes is let go there.
#[test]
fn all_mappings_are_watched_as_long_as_they_hold_words() {
    let recordings = recorded("watch::child_that_has_a_page_twice", "");
    let lines = &recordings[0].lines;
    let one = |name: &str, key: &str| {
        let mut found = lines.iter().filter(|line| line.name == name);
        let first = found.next().and_then(|line| line.text(key)).unwrap();
        assert!(found.next().is_none(), "{name} stands there twice");
        first.to_owned()
    };
    assert_eq!(one("HostStore", "value"), "7");
    assert_eq!(one("HostStore", "addr"), one("HostMap", "addr"));
    assert_eq!(one("HostMap", "file"), one("cuMemHostRegister", "file"));
    assert_eq!(one("Fault", "what"), "unmapped_before");
    let loads = lines.iter().filter(|line| line.name == "HostLoad");
    let loads: Vec<_> = loads.filter_map(|line| line.number("value")).collect();
    assert_eq!(loads.first(), Some(&7));
    assert_eq!(loads.last(), Some(&8));
}

#[test]
#[ignore = "the process that the other tests start"]
fn child_that_puts_under_faults() {
    let (_alone, loaded) = alone();
    loaded.set("FAULTS", &std::env::var("PP_TEST_FAULTS").unwrap());
    loaded.note("Mark name=run");
    torn(|same, _| same, 20);
    loaded.note("Mark name=end");
}

/// Whatever became of the bytes: the order shows it.
#[test]
fn the_checker_goes_by_what_hosts_have_seen() {
    let expect = Expect {
        warm_up: usize::MAX,
        ..Expect::default()
    };
    let judge = |faults: &str| {
        check(
            &recorded("watch::child_that_puts_under_faults", faults),
            expect,
        )
    };
    let report = judge("");
    report.assert_clean();
    assert_eq!(report.transfers, 20);
    // A number and a credit in turn.
    for k in [11, 12] {
        for how in ["early", "other"] {
            let report = judge(&format!("cuStreamWriteValue32:{k}:{how}"));
            assert!(report.broke(Rule::Race), "{how} {k}");
        }
    }
    assert!(judge("cuMemcpyDtoDAsync:1:skip").broke(Rule::Unwritten));
}
