// frame_encoder.h: a slot of the ring becomes messages of the wire.
//
// A frame that does not fit one message is split between blocks and, within a
// block, between layers, into parts of the same step.  Values are copied bit by
// bit: NaN payloads survive.
//
// Not thread-safe.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_FRAME_ENCODER_H_
#define BELLWETHER_CLIENT_LIB_SENDER_FRAME_ENCODER_H_

#include <cstdint>
#include <vector>

#include "bellwether/v1/ingest.pb.h"
#include "client_lib/src/frame_ring.h"

namespace bellwether::client {

// What else goes into every message.
struct EncodeContext {
  uint32_t attempt = 0;
  uint64_t dropped_ring_total = 0;
  uint64_t dropped_window_total = 0;
  uint64_t stripped_total = 0;  // Before this one.
  uint32_t message_bytes_max = 1 << 20;
  uint64_t values_max = 0;  // Floats that a slot holds.
  uint64_t slot_bytes = 0;
  bool run_signals_only = false;
};

class FrameEncoder {
 public:
  static constexpr uint32_t kPartsMax = 1024;
  static constexpr int kPartBlocksMax = 128;  // As ingest.proto says.

  // Encodes the slot into messages(), without seq.  False if the slot makes no
  // sense (a wild write in the trainer), if the frame needs more than kPartsMax
  // parts, or if nothing is left of it; messages() is then empty.
  bool Encode(const char* slot, const EncodeContext& context);

  const std::vector<v1::ClientMessage>& messages() const { return messages_; }
  // messages() lack signals of the slot, which are none of the run.
  bool stripped() const { return stripped_; }
  // Some frame had signals of the job's own.
  bool own_seen() const { return own_seen_; }

 private:
  bool EncodeFrame(const char* slot, const EncodeContext& context);
  // The slot's own values, which lie behind `values_count` floats, into the frame's parts.
  bool AddOwn(const char* slot, uint64_t values_count, const EncodeContext& context);
  bool EncodeNames(const char* slot, const EncodeContext& context);
  bool EncodeEvent(const char* slot, const EncodeContext& context);
  bool EncodeSpectrum(const char* slot, const EncodeContext& context);
  bool EncodeActionResult(const char* slot, const EncodeContext& context);

  v1::Frame* AddPart(const SlotHeader& header, const EncodeContext& context);

  std::vector<v1::ClientMessage> messages_;
  bool stripped_ = false;
  bool own_seen_ = false;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_FRAME_ENCODER_H_
