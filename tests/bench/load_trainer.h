// load_trainer.h: one run of one rank, as cheap as it can be for a maker of
// load.
//
// Frames are encoded once and shared by all trainers.  A message is {seq, step}
// and a slice of those bytes, which the decoder merges into one frame.  What is
// measured is from the moment at which a frame was due, not from its write.  So
// a server that stands still shows in every frame that had to wait.
//
// Thread-safe; gRPC's threads do the work.

#ifndef BELLWETHER_TESTS_BENCH_LOAD_TRAINER_H_
#define BELLWETHER_TESTS_BENCH_LOAD_TRAINER_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bellwether/v1/ingest.pb.h"
#include "client_lib/src/backoff.h"

namespace bellwether {

// What a run sends, encoded: messages that come first, then frames in turn; with_nan: the
// first value is NaN.
struct EncodedFrames {
  EncodedFrames();  // The frames of MakeBenchFrames.
  EncodedFrames(const std::vector<v1::ClientMessage>& first_messages, std::vector<v1::ClientMessage> frames);
  std::vector<grpc::Slice> first, plain, with_nan;
};

class LoadTrainer {
 public:
  struct Acked {
    double due, at;  // BenchNow()
  };

  // `frames` outlives it; what comes first is due at once.  `number` makes the uuid and the
  // first step.
  LoadTrainer(std::string run, int number, const EncodedFrames* frames);
  ~LoadTrainer();

  // Opens a stream on `channel`, behind what is durable.  Not while connected().
  void Connect(const std::shared_ptr<grpc::Channel>& channel);
  // Connects, on a new channel, whenever there is no stream and its backoff is
  // over; to be called every few milliseconds.
  void KeepConnected(const std::function<std::shared_ptr<grpc::Channel>()>& open);
  // Breaks the stream.
  void Cut();
  // Where the last stream was told that the run is served; "" = it was not, or that
  // was asked for before.
  std::string TakeMoved();
  bool welcomed() const { return welcomed_.load(std::memory_order_acquire); }

  // `count` more frames are due since `due`.  `nan`: one that raises an alert.
  void Offer(uint64_t count, double due, bool nan = false);
  // Sends as fast as acknowledgements come, `window` frames at most; 0 = ends it.
  void Saturate(uint64_t window);

  uint64_t offered() const;
  uint64_t acked() const;
  // When the frame with the NaN was due; 0 = there was none.
  double nan_due() const;
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }  // Streams that ended unasked.
  std::string error() const;
  // What was acknowledged since the last call.
  std::vector<Acked> TakeAcked();

 private:
  class Call;

  grpc::ByteBuffer MakeMessage(uint64_t seq, bool nan) const;
  void OnWelcome(uint64_t durable_seq);
  void OnAck(uint64_t durable_seq);
  void OnMoved(const std::string& address);
  void Pump();                               // REQUIRES: mutex_ held.
  void NoteAcked(uint64_t seq, double now);  // REQUIRES: mutex_ held.

  const std::string run_;
  const int number_;
  const EncodedFrames* const frames_;
  std::atomic<bool> welcomed_{false};
  std::atomic<uint64_t> refused_{0};

  mutable std::mutex mutex_;
  std::condition_variable ended_condition_;
  std::unique_ptr<Call> call_;
  bool ended_ = true;  // No stream, or its OnDone has come.
  bool writing_ = false;
  bool cut_ = false;
  uint64_t offered_ = 0, sent_ = 0, acked_ = 0, nan_seq_ = 0, window_ = 0;
  std::vector<double> due_;  // By seq - 1.
  std::vector<Acked> acks_;
  double nan_due_ = 0, next_try_ = 0;
  std::string error_, moved_to_;
  client::Backoff backoff_;
};

}  // namespace bellwether

#endif  // BELLWETHER_TESTS_BENCH_LOAD_TRAINER_H_
