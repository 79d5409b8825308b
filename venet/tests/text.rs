//! What users write and read: policies, placements, offload groups.

use core::fmt::{Debug, Display};
use core::str::FromStr;
use proptest::prelude::*;
use venet::offload::Groups;
use venet::pump::placement::Placement;
use venet::pump::policy::Policy;

fn parsed<T: FromStr>(text: &str) -> Result<T, String>
where
    T::Err: Display,
{
    text.parse().map_err(|error: T::Err| error.to_string())
}

fn comes_back<T: FromStr + Display + Debug + PartialEq>(value: &T)
where
    T::Err: Display,
{
    assert_eq!(parsed::<T>(&value.to_string()).as_ref(), Ok(value));
}

#[test]
fn policies() {
    assert_eq!(parsed("event-index"), Ok(Policy::EventIndex));
    assert_eq!(parsed("immediate"), Ok(Policy::Immediate));
    for policy in [Policy::EventIndex, Policy::Immediate] {
        comes_back(&policy);
    }
    assert_eq!(Policy::default(), Policy::EventIndex);
    for text in ["", "Immediate", "event_index", "immediate ", "poll\n"] {
        let expected = format!("unknown policy {text:?}: expected event-index or immediate");
        assert_eq!(parsed::<Policy>(text), Err(expected));
    }
}

#[test]
fn placements() {
    let cpus = |cpus: &[usize]| Ok(Placement::Cpus(cpus.to_vec()));
    let table = [
        ("none", Ok(Placement::None)),
        ("0", cpus(&[0])),
        ("7", cpus(&[7])),
        ("0,2", cpus(&[0, 2])),
        ("0+2", cpus(&[0, 2])),
        ("1-3", cpus(&[1, 2, 3])),
        ("3-3", cpus(&[3])),
        ("0+2-4", cpus(&[0, 2, 3, 4])),
        ("0-1,5,8-9", cpus(&[0, 1, 5, 8, 9])),
        ("1023", cpus(&[1023])),
    ];
    for (text, expected) in table {
        assert_eq!(parsed(text), expected, "{text}");
    }
    assert_eq!(Placement::None.to_string(), "none");
    assert_eq!(Placement::Cpus(vec![0, 2, 3]).to_string(), "0+2+3");
    assert_eq!(Placement::default(), Placement::None);
    for text in ["", "None", "x", "-1", "1-", "-", "3-1", "1,,2", "1+", "1 ", "0x1", "1-2-3", "1024", "0-1024"] {
        let expected = format!("{text:?} is no placement: expected none, or CPU numbers such as 0 or 0+2-3");
        assert_eq!(parsed::<Placement>(text), Err(expected));
    }
    // A range that would need all memory is refused, not written out.
    assert!(parsed::<Placement>("0-18446744073709551615").is_err());
}

#[test]
fn a_thread_runs_where_it_was_placed() {
    let allowed = || rustix::thread::sched_getaffinity(None).unwrap();
    std::thread::spawn(move || {
        let before = allowed();
        Placement::None.apply().unwrap();
        assert_eq!(allowed(), before);
        let cpu = (0..1024).find(|&cpu| before.is_set(cpu)).unwrap();
        Placement::Cpus(vec![cpu]).apply().unwrap();
        assert_eq!((allowed().count(), allowed().is_set(cpu)), (1, true));
        assert!(Placement::Cpus(vec![1023]).apply().is_err(), "there is no such CPU here");
    })
    .join()
    .unwrap();
}

#[test]
fn offload_groups() {
    let link = Groups::LINK_EVENTS;
    let set = |groups: &[Groups]| Groups::from_bits(groups.iter().fold(link.bits(), |bits, group| bits | group.bits()));
    let table = [
        ("all", Groups::ALL),
        ("none", link),
        ("link", link),
        ("csum", set(&[Groups::CSUM])),
        ("csum,tso4", set(&[Groups::CSUM, Groups::TSO4])),
        ("csum+tso6+uso", set(&[Groups::CSUM, Groups::TSO6, Groups::USO])),
        ("csum,ecn", set(&[Groups::CSUM])),
        ("ecn,tso4,csum", set(&[Groups::CSUM, Groups::TSO4, Groups::ECN])),
        ("csum,tso4,tso6,uso,ecn,link", Groups::ALL),
        ("csum,csum,none", set(&[Groups::CSUM])),
        // The kernel does not cut what it need not checksum.
        ("tso4", link),
    ];
    for (text, expected) in table {
        assert_eq!(parsed(text), Ok(expected), "{text}");
    }
    assert_eq!(Groups::NONE.to_string(), "none");
    assert_eq!(Groups::ALL.to_string(), "csum,tso4,tso6,uso,ecn,link");
    assert_eq!(Groups::ALL.names(), ["csum", "tso4", "tso6", "uso", "ecn", "link"]);
    for (text, word) in
        [("", ""), ("TSO4", "TSO4"), ("csum,,tso4", ""), ("csum,ufo", "ufo"), ("csum tso4", "csum tso4")]
    {
        let expected =
            format!("unknown offload {word:?}: expected all, none, or a list of csum, tso4, tso6, uso, ecn, link");
        assert_eq!(parsed::<Groups>(text), Err(expected));
    }
}

#[test]
fn groups_without_their_precondition_are_taken_away() {
    assert_eq!(Groups::ALL.without(Groups::CSUM), Groups::LINK_EVENTS);
    assert_eq!(Groups::from_bits(Groups::TSO4.bits()), Groups::NONE);
    assert_eq!(Groups::ALL & Groups::from_bits(Groups::TSO6.bits()), Groups::NONE);
    assert_eq!(Groups::from_bits(u64::MAX), Groups::ALL);
}

proptest! {
    #[test]
    fn any_placement_comes_back(cpus in proptest::collection::vec(0usize..1024, 1..20)) {
        comes_back(&Placement::Cpus(cpus));
    }

    /// Link events are always asked for, so sets with them come back.
    #[test]
    fn any_groups_come_back(bits in any::<u64>()) {
        comes_back(&Groups::from_bits(bits | Groups::LINK_EVENTS.bits()));
    }

    #[test]
    fn no_text_makes_them_panic(text in "[-+,a-z0-9 ]{0,30}") {
        let _ = (parsed::<Policy>(&text), parsed::<Placement>(&text), parsed::<Groups>(&text));
    }
}
