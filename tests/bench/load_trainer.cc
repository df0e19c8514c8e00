#include "tests/bench/load_trainer.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/bench/load_parts.h"

namespace bellwether {
namespace {

constexpr char kMethod[] = "/bellwether.v1.Ingest/Attach";

grpc::ByteBuffer ToBuffer(const v1::ClientMessage& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

EncodedFrames::EncodedFrames() : EncodedFrames({}, MakeBenchFrames()) {}

EncodedFrames::EncodedFrames(const std::vector<v1::ClientMessage>& first_messages,
                             std::vector<v1::ClientMessage> frames) {
  for (const v1::ClientMessage& message : first_messages) first.emplace_back(message.SerializeAsString());
  for (v1::ClientMessage& frame : frames) {
    plain.emplace_back(frame.SerializeAsString());
    frame.mutable_frame()->mutable_blocks(0)->set_values(0, NAN);
    with_nan.emplace_back(frame.SerializeAsString());
  }
}

// One stream.  Lives until it has ended and its trainer lets it go.
class LoadTrainer::Call final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Call(LoadTrainer* trainer, const std::shared_ptr<grpc::Channel>& channel) : trainer_(trainer), stub_(channel) {}

  void Start(const v1::ClientMessage& hello) {
    stub_.PrepareBidiStreamingCall(&context_, kMethod, {}, this);
    outgoing_ = ToBuffer(hello);
    AddHold();  // Writes start outside of reactions.
    StartRead(&incoming_);
    StartWrite(&outgoing_);
    StartCall();
  }
  void Write(grpc::ByteBuffer message) {
    outgoing_ = std::move(message);
    StartWrite(&outgoing_);
  }
  void Cancel() { context_.TryCancel(); }
  bool readable() const { return readable_; }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(trainer_->mutex_);
    trainer_->writing_ = false;
    if (ok) trainer_->Pump();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      {
        const std::lock_guard lock(trainer_->mutex_);
        readable_ = false;
      }
      RemoveHold();
      return;
    }
    v1::ServerMessage message;
    grpc::ProtoBufferReader reader(&incoming_);
    if (message.ParseFromZeroCopyStream(&reader)) {
      if (message.has_welcome()) trainer_->OnWelcome(message.welcome().durable_seq());
      if (message.has_moved()) trainer_->OnMoved(message.moved().address());
      if (message.has_ack()) trainer_->OnAck(message.ack().durable_seq());
    }
    StartRead(&incoming_);
  }

  void OnDone(const grpc::Status& status) override {
    const std::lock_guard lock(trainer_->mutex_);
    trainer_->welcomed_.store(false, std::memory_order_release);
    if (!trainer_->cut_) {
      trainer_->error_ = status.error_message();
      trainer_->refused_.fetch_add(1, std::memory_order_relaxed);
    }
    trainer_->next_try_ =
        trainer_->moved_to_.empty() ? BenchNow() + std::chrono::duration<double>(trainer_->backoff_.Next()).count() : 0;
    trainer_->ended_ = true;
    // The trainer may be gone behind this.
    trainer_->ended_condition_.notify_all();
  }

 private:
  LoadTrainer* const trainer_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer outgoing_, incoming_;
  bool readable_ = true;
};

LoadTrainer::LoadTrainer(std::string run, int number, const EncodedFrames* frames)
    : run_(std::move(run)),
      number_(number),
      frames_(frames),
      offered_(frames->first.size()),
      due_(frames->first.size(), BenchNow()),
      backoff_(static_cast<uint64_t>(number)) {}

LoadTrainer::~LoadTrainer() {
  std::unique_lock lock(mutex_);
  cut_ = true;
  if (call_ != nullptr && !ended_) call_->Cancel();
  ended_condition_.wait(lock, [this] { return ended_; });
}

void LoadTrainer::Connect(const std::shared_ptr<grpc::Channel>& channel) {
  const std::lock_guard lock(mutex_);
  call_ = std::make_unique<Call>(this, channel);
  ended_ = cut_ = false;
  writing_ = true;  // The Hello.
  call_->Start(MakeBenchHello(run_, number_));
}

void LoadTrainer::KeepConnected(const std::function<std::shared_ptr<grpc::Channel>()>& open) {
  {
    const std::lock_guard lock(mutex_);
    if (!ended_ || BenchNow() < next_try_) return;
  }
  Connect(open());
}

void LoadTrainer::Cut() {
  const std::lock_guard lock(mutex_);
  cut_ = true;
  next_try_ = 0;
  if (!ended_) call_->Cancel();
}

void LoadTrainer::Offer(uint64_t count, double due, bool nan) {
  const std::lock_guard lock(mutex_);
  for (uint64_t i = 0; i < count; ++i) due_.push_back(due);
  offered_ += count;
  if (nan) {
    nan_seq_ = offered_;
    nan_due_ = due;
  }
  Pump();
}

void LoadTrainer::Saturate(uint64_t window) {
  const std::lock_guard lock(mutex_);
  window_ = window;
  Pump();
}

uint64_t LoadTrainer::offered() const {
  const std::lock_guard lock(mutex_);
  return offered_;
}

uint64_t LoadTrainer::acked() const {
  const std::lock_guard lock(mutex_);
  return acked_;
}

double LoadTrainer::nan_due() const {
  const std::lock_guard lock(mutex_);
  return nan_due_;
}

std::string LoadTrainer::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::vector<LoadTrainer::Acked> LoadTrainer::TakeAcked() {
  const std::lock_guard lock(mutex_);
  return std::exchange(acks_, {});
}

grpc::ByteBuffer LoadTrainer::MakeMessage(uint64_t seq, bool nan) const {
  v1::ClientMessage head;
  head.set_seq(seq);
  const size_t first = frames_->first.size();
  if (seq <= first) {
    const grpc::Slice slices[] = {grpc::Slice(head.SerializeAsString()), frames_->first[seq - 1]};
    return grpc::ByteBuffer(slices, 2);
  }
  const uint64_t frame = seq - 1 - first;
  // Jobs are at different steps: their windows do not fill at the same moment.
  head.mutable_frame()->set_step(37 * int64_t{number_} + static_cast<int64_t>(frame));
  const auto& frames = nan ? frames_->with_nan : frames_->plain;
  const grpc::Slice slices[] = {grpc::Slice(head.SerializeAsString()), frames[frame % frames.size()]};
  return grpc::ByteBuffer(slices, 2);
}

void LoadTrainer::OnWelcome(uint64_t durable_seq) {
  const std::lock_guard lock(mutex_);
  const double now = BenchNow();
  while (acked_ < std::min(durable_seq, offered_)) NoteAcked(++acked_, now);
  sent_ = acked_;
  backoff_.Reset();
  welcomed_.store(true, std::memory_order_release);
  Pump();
}

void LoadTrainer::OnAck(uint64_t durable_seq) {
  const std::lock_guard lock(mutex_);
  const double now = BenchNow();
  while (acked_ < std::min(durable_seq, sent_)) NoteAcked(++acked_, now);
  Pump();
}

void LoadTrainer::OnMoved(const std::string& address) {
  const std::lock_guard lock(mutex_);
  moved_to_ = address;
  cut_ = true;
  call_->Cancel();
}

std::string LoadTrainer::TakeMoved() {
  const std::lock_guard lock(mutex_);
  return std::exchange(moved_to_, "");
}

void LoadTrainer::NoteAcked(uint64_t seq, double now) { acks_.push_back({due_[seq - 1], now}); }

void LoadTrainer::Pump() {
  if (writing_ || ended_ || !welcomed_.load(std::memory_order_relaxed) || !call_->readable()) return;
  if (sent_ == offered_) {
    if (window_ == 0 || sent_ - acked_ >= window_) return;
    due_.push_back(BenchNow());
    ++offered_;
  }
  ++sent_;
  writing_ = true;
  call_->Write(MakeMessage(sent_, sent_ == nan_seq_));
}

}  // namespace bellwether
