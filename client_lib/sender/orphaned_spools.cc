#include "client_lib/sender/orphaned_spools.h"

#include <algorithm>
#include <cstring>

#include "client_lib/src/watchdog.h"

namespace bellwether::client {
namespace {

constexpr std::chrono::milliseconds kLookEvery{100};
// A sender ends kDrainSeconds after its trainer, and needs a moment to write down what is left.
constexpr std::chrono::seconds kBusyMax = kDrainSeconds + std::chrono::seconds(15);

constexpr char kDiedInMemory[] = "they died with its sender's memory, or their file is damaged";

}  // namespace

struct OrphanedSpools::Sending {
  std::unique_ptr<SpoolFolder> folder;
  v1::ClientMessage hello;
  SharedMemory memory;
  std::unique_ptr<Spool> spool;  // Outlives the window.
  std::unique_ptr<Window> window;
  std::unique_ptr<Intake> intake;
  std::unique_ptr<CommandQueue> commands;
  std::unique_ptr<Session> session;
  uint64_t frames = 0;  // Not durable when it was found.
};

OrphanedSpools::OrphanedSpools(const Parts& parts, uint64_t own) : parts_(parts) {
  for (const uint64_t number : SpoolFolder::Older(parts_.header->config, own)) {
    numbers_.push_back(number);
    waiting_bytes_ += SpoolFolder::BytesOf(parts_.header->config, number);
  }
}

OrphanedSpools::~OrphanedSpools() = default;

uint64_t OrphanedSpools::bytes() const {
  return waiting_bytes_ + (sending_ != nullptr && sending_->spool != nullptr ? sending_->spool->bytes() : 0);
}

// Puts the folder's messages where a sender that had been restarted would find
// them: what was in its memory into a memory, the rest stays on disk.
bool OrphanedSpools::Restore(Sending* s) const {
  const auto hello = s->folder->LoadHello();
  if (!hello.has_value()) return false;
  s->hello = *hello;
  // Nobody is there to act.
  s->hello.mutable_hello()->clear_capabilities();
  s->hello.mutable_hello()->clear_ranks_agree();
  s->spool = std::make_unique<Spool>(Spool::Options{.folder = s->folder->path()});
  Spool memory_file({.folder = s->folder->path(), .suffix = ".window"});
  if (!s->spool->Open(UINT64_MAX) || !memory_file.Open(UINT64_MAX)) return false;
  if (s->memory.Create({.slot_count = 2, .values_max = 16}) != 0) return false;
  SharedHeader* header = s->memory.header();
  header->config = parts_.header->config;
  header->config.attempt = s->hello.hello().run().attempt();

  s->window = std::make_unique<Window>(&s->memory);
  SenderState* state = s->window->mutable_state();
  SenderState saved;
  const bool known = s->folder->LoadState(&saved);
  *state = saved;
  Spool::Cursor on_disk, in_memory;
  HeldMessage message;
  HeldMessage oldest;
  for (auto [from, cursor] : {std::pair(s->spool.get(), &on_disk), std::pair(&memory_file, &in_memory)}) {
    if (from->Peek(cursor, &message) && (oldest.ordinal == 0 || message.ordinal < oldest.ordinal)) oldest = message;
  }
  if (!known && oldest.ordinal > 0) {
    // Killed within its first round: nothing is said of what came before.
    state->freed_ordinal = state->sent_ordinal = oldest.ordinal - 1;
    state->frames_durable = oldest.frames_admitted - (oldest.last_part ? 1 : 0);
  }
  for (; memory_file.Peek(&in_memory, &message); memory_file.Advance(&in_memory)) {
    if (message.ordinal <= state->freed_ordinal) continue;
    if (s->window->used_bytes() + Window::BytesFor(message.body.size()) > kWindowBytesMax) break;
    std::memcpy(s->window->Prepare(message.body.size()), message.body.data(), message.body.size());
    state->appended_ordinal = message.ordinal - 1;  // The messages between are on disk.
    state->frames_admitted = message.frames_admitted - (message.last_part ? 1 : 0);
    s->window->Append(message.body.size(), message.last_part, 0);
  }
  state->appended_ordinal = std::max({state->appended_ordinal, s->spool->last_ordinal(), saved.appended_ordinal});
  state->frames_admitted = std::max({state->frames_admitted, s->spool->last_frames_admitted(), saved.frames_admitted});
  s->window->Commit();
  s->spool->FreeUpTo(state->freed_ordinal);
  s->window->SetSpool(s->spool.get());
  s->frames = state->frames_admitted - state->frames_durable;
  return true;
}

void OrphanedSpools::Next(Clock::time_point now) {
  if (now < next_look_) return;
  next_look_ = now + kLookEvery;
  auto sending = std::make_unique<Sending>();
  const SenderConfig& config = parts_.header->config;
  std::string error;
  const auto taken = SpoolFolder::Take(config, numbers_.front(), &sending->folder, &error);
  if (taken == SpoolFolder::Result::kBusy) {
    if (busy_since_ == Clock::time_point{}) busy_since_ = now;
    if (now - busy_since_ < kBusyMax) return;
    error = "another sender of this run and rank does not end; what it has on disk is left alone";
  }
  if (taken != SpoolFolder::Result::kOk) {
    Finish(error);
    return;
  }
  sending_ = std::move(sending);
  const uint64_t bytes = SpoolFolder::BytesOf(config, numbers_.front());
  waiting_bytes_ -= std::min(waiting_bytes_, bytes);
  if (!Restore(sending_.get())) {
    Finish(sending_->folder->path() + " cannot be read");
    return;
  }
  if (sending_->folder->IsOld()) {
    Finish("they are more than 7 days old");
    return;
  }
  if (sending_->spool->empty() && sending_->window->used_bytes() == 0) {
    Finish(kDiedInMemory);
    return;
  }
  sending_->intake = std::make_unique<Intake>(&sending_->memory, sending_->window.get());
  sending_->commands = std::make_unique<CommandQueue>(&sending_->memory);
  sending_->session =
      std::make_unique<Session>(Session::Parts{&sending_->memory, sending_->window.get(), sending_->intake.get(),
                                               sending_->commands.get(), parts_.log, parts_.wake, &sending_->hello});
  if (sending_->frames > 0) {
    parts_.log->Once("leftover " + sending_->folder->path(),
                     "sends " + std::to_string(sending_->frames) + " frames of attempt " +
                         std::to_string(sending_->hello.hello().run().attempt()) + " that are left in " +
                         sending_->folder->path());
  }
}

// `trouble` empty = all of it is durable, or was never there.
void OrphanedSpools::Finish(const std::string& trouble) {
  if (sending_ != nullptr) {
    const SenderState* state = sending_->window != nullptr ? &sending_->window->state() : nullptr;
    const uint64_t held = state != nullptr ? state->frames_admitted - state->frames_durable : 0;
    const uint64_t lost = (state != nullptr ? state->frames_lost : 0) + (trouble.empty() ? 0 : held);
    if (lost > 0) {
      parts_.dropped(lost);
      parts_.log->Once("leftover lost " + sending_->folder->path(),
                       std::to_string(lost) + " frames of an earlier attempt will never arrive: " +
                           (trouble.empty() ? kDiedInMemory : trouble));
    }
    sending_->session.reset();
    sending_->folder->Remove();
    sending_.reset();
  } else if (!trouble.empty()) {
    parts_.log->Once("leftover", trouble);
  }
  numbers_.pop_front();
  busy_since_ = {};
  next_look_ = {};
}

void OrphanedSpools::LeaveAlone(const std::string& why) {
  parts_.log->Once("leftover kept " + sending_->folder->path(),
                   "frames of an earlier attempt stay in " + sending_->folder->path() + ": " + why);
  sending_.reset();
  numbers_.pop_front();
  busy_since_ = {};
  next_look_ = {};
}

void OrphanedSpools::Step(Clock::time_point now) {
  if (numbers_.empty()) return;
  if (sending_ == nullptr) Next(now);
  if (sending_ == nullptr) return;
  Sending& s = *sending_;
  if (s.window->empty()) {
    Finish("");
    return;
  }
  s.session->Step(now);
  char trouble[SharedText::kBytes];
  s.memory.header()->error.Get(trouble);
  if (trouble[0] != '\0') parts_.header->error.Set(trouble);
  s.window->FreeUpTo(s.session->durable_ordinal());
  // A sender that is killed now goes on from here; where it cannot be written,
  // the server's own word on what is durable has to do.
  (void)s.folder->SaveState(s.window->state());
  if (!s.session->failed()) return;
  const std::string why = std::string("the server does not take them: ") + trouble;
  // A fenced attempt and what is malformed stay so.
  if (s.session->failure() == grpc::StatusCode::ABORTED || s.session->failure() == grpc::StatusCode::INVALID_ARGUMENT) {
    Finish(why);
  } else {
    LeaveAlone(why);
  }
}

}  // namespace bellwether::client
