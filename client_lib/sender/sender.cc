#include "client_lib/sender/sender.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "bellwether/client.h"
#include "client_lib/sender/messages.h"
#include "client_lib/src/watchdog.h"

namespace bellwether::client {
namespace {

constexpr int kTakeMax = 64;  // Frames per round, so that acks are not kept waiting.
constexpr std::chrono::milliseconds kBusyWait{1};
constexpr std::chrono::milliseconds kIdleWait{5};
constexpr std::chrono::seconds kFlushEvery{1};
constexpr uint64_t kFlushBytes = uint64_t{4} << 20;
constexpr std::chrono::milliseconds kLockCheckEvery{100};
constexpr std::chrono::seconds kByeWithin{5};

std::atomic<bool> asked_to_end{false};

std::string LogPrefix(const SenderConfig& config) {
  return "bellwether-sender: run " + std::string(config.run) + " rank " + std::to_string(config.rank) + ": ";
}

}  // namespace

void AskToEnd() { asked_to_end.store(true, std::memory_order_relaxed); }

Sender::Sender(SharedMemory* memory)
    : memory_(memory),
      header_(memory->header()),
      log_(header_->config.log_path, LogPrefix(header_->config)),
      window_(memory),
      intake_(memory, &window_),
      commands_(memory),
      record_cursor_(window_.Begin()) {
  if (header_->config.server[0] != '\0') {
    StartSpool();
    session_ =
        std::make_unique<Session>(Session::Parts{memory, &window_, &intake_, &commands_, &log_, [this] { Wake(); }});
  }
  StartRecorder();
}

// The stream's last reaction may still call `wake`.
Sender::~Sender() {
  orphaned_spools_.reset();
  session_.reset();
}

void Sender::Wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  woken_ = true;
  condition_.notify_one();
}

void Sender::StartSpool() {
  const SenderConfig& config = header_->config;
  if (config.spool_dir[0] == '\0') return;
  SenderState* state = window_.mutable_state();
  std::string error;
  SpoolFolder::Result made = SpoolFolder::Result::kError;
  if (state->spool_number != 0) made = SpoolFolder::Take(config, state->spool_number, &folder_, &error);
  if (made == SpoolFolder::Result::kError && error.empty()) made = SpoolFolder::Make(config, &folder_, &error);
  if (made == SpoolFolder::Result::kOk) {
    spool_ = std::make_unique<Spool>(Spool::Options{.folder = folder_->path(), .bytes_max = config.spool_bytes});
    if (!spool_->Open(state->appended_ordinal)) {
      error = spool_->trouble();
    } else if (!folder_->SaveHello(MakeHello(config))) {
      error = "cannot write to " + folder_->path() + ": " + std::strerror(errno);
    }
  } else if (made == SpoolFolder::Result::kBusy) {
    error = "another sender has the spool of this run and rank";
  }
  if (!error.empty()) {
    log_.Once("spool", "no spool: " + error + "; frames wait in memory (64 MiB, then thinned)");
    spool_.reset();
    folder_.reset();
    return;
  }
  const int forsaken = SpoolFolder::RemoveForsaken(config);
  if (forsaken > 0) {
    log_.Once("forsaken", std::to_string(forsaken) + " spools of other runs in " + config.spool_dir +
                              " that nobody came back for in 7 days were deleted");
  }
  state->spool_number = folder_->number();
  window_.Commit();
  spool_->FreeUpTo(state->freed_ordinal);
  window_.SetSpool(spool_.get());
  orphaned_spools_ = std::make_unique<OrphanedSpools>(OrphanedSpools::Parts{header_, &log_, [this] { Wake(); },
                                                                            [this](uint64_t frames) {
                                                                              window_.mutable_state()->frames_dropped +=
                                                                                  frames;
                                                                              window_.Commit();
                                                                            }},
                                                      folder_->number());
}

void Sender::StepSpool() {
  if (spool_ == nullptr) return;
  if (!spool_->trouble().empty()) log_.Once("spool", spool_->trouble() + "; what does not fit the memory is thinned");
  if (orphaned_spools_ != nullptr && orphaned_spools_->done()) orphaned_spools_.reset();
  const uint64_t left = orphaned_spools_ == nullptr ? 0 : orphaned_spools_->bytes();
  spool_->set_other_bytes(left);
  header_->spool_bytes.store(spool_->bytes() + left, std::memory_order_relaxed);
  if (spool_->empty()) {
    folder_->DropState();
  } else if (!folder_->SaveState(window_.state())) {
    log_.Once("spool state", "cannot write to " + folder_->path() + ": " + std::strerror(errno));
  }
}

bool Sender::KeepOnDisk() {
  if (spool_ == nullptr || (session_ != nullptr && session_->failure() == grpc::StatusCode::ABORTED)) return false;
  while (!intake_.drained()) intake_.Take(kTakeMax);
  Spool memory({.folder = folder_->path(), .suffix = ".window", .bytes_max = UINT64_MAX, .free_bytes_min = 0});
  Window::Cursor cursor = window_.Begin();
  Window::Message message;
  std::vector<Window::Message> frame;
  while (window_.ReadMemory(&cursor, &message)) {
    frame.push_back(message);
    if (!message.last_part) continue;
    const bool kept = memory.Append(frame);
    frame.clear();
    if (kept) continue;
    log_.Once("kept", memory.trouble() + "; the next attempt will count what is missing");
    break;
  }
  return (!spool_->empty() || !memory.empty()) && folder_->SaveState(window_.state());
}

void Sender::StartRecorder() {
  const std::string path = header_->config.record_path;
  if (path.empty()) return;
  SenderState* state = window_.mutable_state();
  recorder_ = std::make_unique<Recorder>(path, header_->config.rank);
  const bool resume = state->record_started != 0;
  if (!recorder_->Open(MakeHello(header_->config), resume)) {
    header_->error.Set(recorder_->error());
    log_.Once("recorder", recorder_->error());
    recorder_.reset();
    return;
  }
  state->record_started = 1;
  state->recorded_ordinal = std::max(state->recorded_ordinal, recorder_->readable_ordinal());
  window_.Commit();
  if (session_ == nullptr) header_->link.store(BW_LINK_RECORDING, std::memory_order_relaxed);
}

void Sender::Record(Clock::time_point now, bool flush) {
  if (recorder_ == nullptr) return;
  SenderState* state = window_.mutable_state();
  bool ok = true;
  Window::Message message;
  while (ok && window_.Read(&record_cursor_, &message)) {
    if (message.ordinal <= state->recorded_ordinal || message.ordinal <= recorder_->written_ordinal()) continue;
    ok = recorder_->Write(message.ordinal, message.body);
    if (message.last_part && session_ == nullptr)
      state->frames_sent = std::max(state->frames_sent, message.frames_admitted);
  }
  const bool pending = recorder_->written_ordinal() > state->recorded_ordinal;
  if (ok && pending && (flush || now >= next_flush_ || recorder_->pending_bytes() >= kFlushBytes)) {
    ok = recorder_->Flush(flush);
    if (ok) {
      state->recorded_ordinal = recorder_->readable_ordinal();
      window_.Commit();
    }
    next_flush_ = now + kFlushEvery;
  }
  if (!ok) {
    header_->error.Set(recorder_->error());
    log_.Once("recorder", recorder_->error());
    recorder_.reset();
  }
}

void Sender::FreeDurable() {
  const bool link = session_ != nullptr && !session_->failed();
  uint64_t durable = window_.state().appended_ordinal;
  if (link) durable = std::min(durable, session_->durable_ordinal());
  if (recorder_ != nullptr) durable = std::min(durable, window_.state().recorded_ordinal);
  if (link || recorder_ != nullptr) window_.FreeUpTo(durable);
  window_.Settle();
}

bool Sender::IsFinished(Clock::time_point now) {
  if (ending_since_ == Clock::time_point{}) {
    if (header_->trainer_state.load(std::memory_order_acquire) == TrainerState::kClosed) {
      ending_since_ = now;
    } else if (now >= next_lock_check_) {
      next_lock_check_ = now + kLockCheckEvery;
      if (!memory_->TrainerHoldsLock()) {
        ending_since_ = now;
        trainer_died_ = header_->trainer_state.load(std::memory_order_acquire) != TrainerState::kClosed;
      }
    }
    if (ending_since_ == Clock::time_point{}) return false;
    log_.LetGoOfStderr();
    // One that came before was meant for the trainer, or for all at once.
    asked_to_end.store(false, std::memory_order_relaxed);
  }
  if (now - ending_since_ > kDrainSeconds || asked_to_end.load(std::memory_order_relaxed)) return true;
  const bool link = session_ != nullptr && !session_->failed();
  if (link && session_->bye_done()) return true;
  if (!intake_.drained() || !window_.empty()) return false;
  if (!link) return true;
  if (bye_since_ != Clock::time_point{} && now - bye_since_ > kByeWithin) return true;
  // Once more where the stream broke before its answer: the server may not have kept it.
  if (session_->streaming() && !session_->bye_said()) {
    const v1::ByeReason reason = trainer_died_                   ? v1::BYE_REASON_DIED
                                 : window_.state().detached != 0 ? v1::BYE_REASON_DETACHED
                                                                 : v1::BYE_REASON_FINISHED;
    session_->SendBye(reason, "");
    if (bye_since_ == Clock::time_point{}) bye_since_ = now;
  }
  return false;
}

void Sender::FinishRecording() {
  if (recorder_ == nullptr) return;
  Record(Clock::now(), true);
  if (recorder_ == nullptr) return;
  const v1::ByeReason reason = trainer_died_ ? v1::BYE_REASON_DIED : v1::BYE_REASON_FINISHED;
  const v1::ClientMessage bye = MakeBye(reason, window_.state().recorded_ordinal, "");
  if (!recorder_->Write(0, bye.SerializeAsString()) || !recorder_->Finish()) header_->error.Set(recorder_->error());
}

void Sender::Wait(bool busy) {
  std::unique_lock<std::mutex> lock(mutex_);
  condition_.wait_for(lock, busy ? kBusyWait : kIdleWait, [this] { return woken_; });
  woken_ = false;
}

SenderEnd Sender::End() {
  FinishRecording();
  FreeDurable();
  const SenderState& state = window_.state();
  const uint64_t held = state.frames_admitted - state.frames_durable;
  const bool complete = intake_.drained() && held == 0;
  const bool kept = !complete && KeepOnDisk();
  if (kept) {
    log_.Once("kept", std::to_string(state.frames_admitted - state.frames_durable) + " frames wait in " +
                          folder_->path() + " for the next attempt");
  } else if (!complete) {
    intake_.DropRest();
    window_.mutable_state()->frames_dropped += state.frames_admitted - state.frames_durable;
    window_.Commit();
    log_.Once("abandoned", std::to_string(state.frames_dropped) + " frames were never delivered");
  }
  if (folder_ != nullptr && !kept) folder_->Remove();
  const bool failed = recorder_ == nullptr && (session_ == nullptr || session_->failed());
  if (failed) header_->link.store(BW_LINK_FAILED, std::memory_order_relaxed);
  return failed ? SenderEnd::kFailed : SenderEnd::kDone;
}

void Sender::Run() {
  uint64_t flushed = 0;
  for (;;) {
    const Clock::time_point now = Clock::now();
    const int taken = intake_.Take(kTakeMax);
    const uint64_t flush_wanted = header_->flush_position.load(std::memory_order_acquire);
    const bool flush = flush_wanted > flushed && window_.state().ring_taken >= flush_wanted;
    // Nothing follows the last of a run, so that does not wait for more to be written with it.
    const bool last = ending_since_ != Clock::time_point{} && intake_.drained();
    Record(now, flush || last);
    if (flush) flushed = flush_wanted;
    if (orphaned_spools_ != nullptr) {
      orphaned_spools_->Step(now);
    } else if (session_ != nullptr) {
      session_->Step(now);
    }
    FreeDurable();
    StepSpool();
    if (IsFinished(now)) break;
    if (session_ != nullptr && session_->failed()) {
      if (recorder_ == nullptr) break;
      header_->link.store(BW_LINK_RECORDING, std::memory_order_relaxed);
    }
    if (session_ == nullptr && recorder_ == nullptr) break;
    if (taken < kTakeMax) Wait(taken > 0);
  }
  header_->sender_end.store(End(), std::memory_order_release);
}

}  // namespace bellwether::client
