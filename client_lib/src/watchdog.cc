#include "client_lib/src/watchdog.h"

#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <thread>

#include "bellwether/client.h"
#include "client_lib/src/backoff.h"
#include "client_lib/src/frame_ring.h"
#include "client_lib/src/spawn.h"

namespace bellwether::client {
namespace {

using Clock = std::chrono::steady_clock;

// A sender that ran this long, or got anything through, was no false start:
// backoff begins anew.
constexpr std::chrono::seconds kHealthyRun{60};
constexpr std::chrono::milliseconds kPoll{200};

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

class Watchdog {
 public:
  Watchdog(std::shared_ptr<SharedMemory> memory, std::string sender_path)
      : memory_(std::move(memory)),
        header_(memory_->header()),
        sender_path_(std::move(sender_path)),
        backoff_(static_cast<uint64_t>(getpid()) << 32 ^ reinterpret_cast<uintptr_t>(memory_.get())) {}

  void Run() {
    PopulateRing();
    for (bool first = true; !IsOver(); first = false) {
      if (!first) {
        if (!Wait(backoff_.Next())) return;
        header_->sender_restarts.fetch_add(1, std::memory_order_relaxed);
      }
      const Clock::time_point started = Clock::now();
      const uint64_t acked = header_->frames_acked.load(std::memory_order_relaxed);
      if (!StartAndWatch()) return;
      if (Clock::now() - started >= kHealthyRun || header_->frames_acked.load(std::memory_order_relaxed) != acked) {
        backoff_.Reset();
      }
      if (!IsOver()) SetLink(BW_LINK_STARTING);
    }
  }

 private:
  void SetLink(bw_link_state link) { header_->link.store(link, std::memory_order_relaxed); }

  bool IsClosed() const { return header_->trainer_state.load(std::memory_order_acquire) == TrainerState::kClosed; }

  // Nothing is left to do, or no time to do it.
  bool IsOver() {
    if (header_->sender_end.load(std::memory_order_acquire) != SenderEnd::kCrashed) return true;
    if (!IsClosed()) return false;
    if (closed_since_ == Clock::time_point{}) closed_since_ = Clock::now();
    return Clock::now() - closed_since_ > kDrainSeconds;
  }

  // The first frame tells how much of a slot is used.  Faulting those pages in
  // now, from this thread, takes the page faults out of the next pushes; the
  // call changes no content.  Kernels before 5.14 refuse, which is as well.
  // Once the ring has wrapped the trainer may be writing the slot again: then
  // the sum is of another frame, or of none, and too much or too little is
  // faulted in.  Not for ThreadSanitizer.
  __attribute__((no_sanitize("thread"))) void PopulateRing() {
    constexpr uint64_t kPage = 4096;
    constexpr uint64_t kPopulateMax = uint64_t{64} << 20;
    const auto* slot = reinterpret_cast<const SlotHeader*>(memory_->ring());
    if (slot->kind != SlotKind::kFrame) return;
    uint64_t used = SlotValuesOffset(slot->block_count);
    const auto* blocks = SlotBlocks(memory_->ring());
    const uint32_t block_count = std::min<uint32_t>(slot->block_count, BW_BLOCKS_MAX);
    for (uint32_t i = 0; i < block_count; ++i) {
      used += uint64_t{blocks[i].layer_count} * blocks[i].head_count * sizeof(float);
    }
    if (used * header_->slot_count > kPopulateMax) return;
    for (uint64_t i = 0; i < header_->slot_count; ++i) {
      const auto begin = reinterpret_cast<uintptr_t>(memory_->ring() + i * header_->slot_bytes);
      const uintptr_t page = begin / kPage * kPage;
      if (madvise(reinterpret_cast<void*>(page), begin + used - page, MADV_POPULATE_WRITE) != 0) return;
    }
  }

  // False once there is nothing left to wait for.
  bool Wait(std::chrono::milliseconds wait) {
    const Clock::time_point until = Clock::now() + wait;
    while (Clock::now() < until) {
      if (IsOver()) return false;
      std::this_thread::sleep_for(std::min<Clock::duration>(kPoll, until - Clock::now()));
    }
    return true;
  }

  // Starts a sender and returns when it has ended.  False if none can start.
  bool StartAndWatch() {
    const std::vector<std::string> candidates = SenderCandidates(sender_path_);
    const std::string path = FindSender(candidates);
    if (path.empty()) {
      Fail(("cannot find bellwether-sender: not an executable file: " + candidates.front()).c_str());
      return false;
    }
    header_->sender_pid.store(0, std::memory_order_relaxed);
    int wait_status = 0;
    const int error = SpawnSender(path, memory_->fd(), &wait_status);
    if (error == ENOENT || error == EACCES || error == ENOEXEC) {
      Fail(("cannot start " + path + ": " + std::strerror(error)).c_str());
      return false;
    }
    if (error > 0) {
      header_->error.Set("cannot start " + path + ": " + std::strerror(error) + "; trying again");
      return true;
    }
    if (error < 0) {
      const bool signalled = WIFSIGNALED(wait_status);
      header_->error.Set("bellwether-sender ended at once with " + std::string(signalled ? "signal " : "status ") +
                         std::to_string(signalled ? WTERMSIG(wait_status) : WEXITSTATUS(wait_status)));
      return true;
    }
    const auto pid = static_cast<pid_t>(header_->sender_pid.load(std::memory_order_acquire));
    if (pid > 0) WaitForEnd(pid);
    header_->sender_pid.store(0, std::memory_order_relaxed);
    return true;
  }

  // The sender is nobody's child here, unless this process reaps orphans.
  void WaitForEnd(pid_t pid) {
    const int pid_fd = OpenPidFd(pid);
    if (pid_fd >= 0) {
      struct pollfd waiting {
        pid_fd, POLLIN, 0
      };
      while (poll(&waiting, 1, -1) < 0 && errno == EINTR) {
      }
      close(pid_fd);
    } else {
      while (kill(pid, 0) == 0) std::this_thread::sleep_for(kPoll);
    }
    waitpid(pid, nullptr, WNOHANG);
  }

  void Fail(const char* why) {
    header_->error.Set(why);
    header_->sender_end.store(SenderEnd::kFailed, std::memory_order_release);
    SetLink(BW_LINK_FAILED);
  }

  std::shared_ptr<SharedMemory> memory_;
  SharedHeader* header_;
  std::string sender_path_;
  Backoff backoff_;
  Clock::time_point closed_since_{};
};

void* WatchdogMain(void* argument) {
  std::unique_ptr<Watchdog> watchdog(static_cast<Watchdog*>(argument));
  pthread_setname_np(pthread_self(), "bw-watchdog");
  try {
    watchdog->Run();
  } catch (const std::bad_alloc&) {
    // Unwatched is better than aborted.
  }
  return nullptr;
}

}  // namespace

int StartWatchdog(std::shared_ptr<SharedMemory> memory, const std::string& sender_path) {
  auto watchdog = std::make_unique<Watchdog>(std::move(memory), sender_path);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // The thread inherits it.
  pthread_t thread;
  const int error = pthread_create(&thread, &attributes, &WatchdogMain, watchdog.get());
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (error == 0) (void)watchdog.release();
  return error;
}

}  // namespace bellwether::client
