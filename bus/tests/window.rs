//! A window that one process of the host sets up while another one waits to pass it on.

use rustix::fs::MemfdFlags;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vbus::abi::{ABI_MAJOR, RingLocation, WINDOW_MAGIC, WindowHeader};
use vbus::south::{Bus, BusConfig};
use vbus::window::Window;
use zerocopy::IntoBytes;

/// A header without a zero byte in what is written once.
fn header(size: u64) -> WindowHeader {
    let ring = RingLocation { words: u64::MAX, data: u64::MAX, length: u64::MAX };
    WindowHeader {
        magic: WINDOW_MAGIC,
        abi_major: ABI_MAJOR,
        header_length: 256,
        window_size: size,
        verbs: ring,
        events: ring,
        doorbells: u32::MAX,
        interrupts: u32::MAX,
        peer_id: u64::MAX,
        ..WindowHeader::default()
    }
}

fn opened_again(window: &Window) -> Window {
    Window::adopt(window.as_fd().try_clone_to_owned().unwrap()).unwrap()
}

#[test]
fn a_header_is_there_when_its_magic_is() {
    let window = Window::create(4096).unwrap();
    let seen = opened_again(&window);
    assert!(!seen.has_header());
    let header = header(4096);
    // All of it but the magic, as a process writes that is interrupted there.
    rustix::io::pwrite(window.as_fd(), &header.as_bytes()[8..], 8).unwrap();
    assert_eq!(seen.header().window_size, 4096);
    assert!(!seen.has_header());
    window.write_header(&header);
    assert!(seen.has_header());
    assert_eq!(seen.header(), header);
}

#[test]
fn whoever_sees_that_there_is_a_header_sees_all_of_it() {
    for _ in 0..2000 {
        let window = Window::create(4096).unwrap();
        let (seen, header) = (opened_again(&window), header(4096));
        let waiting = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&waiting);
        let reader = std::thread::spawn(move || {
            told.store(true, Ordering::Release);
            while !seen.has_header() {
                std::hint::spin_loop();
            }
            seen.header()
        });
        while !waiting.load(Ordering::Acquire) {
            std::hint::spin_loop();
        }
        window.write_header(&header);
        assert_eq!(reader.join().unwrap(), header);
    }
}

#[test]
fn a_bus_gives_its_window_a_header() {
    let window = Arc::new(Window::create(1 << 16).unwrap());
    let bus = Bus::over(BusConfig { peer_id: 3 }, Arc::clone(&window), Vec::new()).unwrap();
    let header = opened_again(&window).header();
    assert!(window.has_header());
    assert_eq!((header.window_size, header.peer_id, header.doorbells), (1 << 16, 3, 1));
    assert_eq!(bus.generation(), 0);
    // A bus that cannot be set up gives it none.
    let window = Arc::new(Window::create(4096).unwrap());
    assert!(Bus::over(BusConfig { peer_id: 3 }, Arc::clone(&window), Vec::new()).is_err());
    assert!(!window.has_header());
}

#[test]
fn memory_without_a_header_is_no_window_for_a_guest() {
    let window = Window::create(4096).unwrap();
    let open = || Window::open(window.as_fd().try_clone_to_owned().unwrap());
    assert!(open().unwrap_err().to_string().contains("magic"));
    window.write_header(&header(4096));
    open().unwrap();
    let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, 4096).unwrap();
    assert!(Window::adopt(unsealed).unwrap_err().to_string().contains("not sealed"));
}
