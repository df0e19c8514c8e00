#include "bellwether/recording.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <zstd.h>

#include <vector>

namespace bellwether {

struct RecordingWriter::State {
  Sink sink;
  ZSTD_CCtx* zstd = ZSTD_createCCtx();
  std::vector<char> out = std::vector<char>(ZSTD_CStreamOutSize());
  std::string scratch;
  bool ok = true;

  // Feeds `bytes` under `directive` until zstd has taken (and, unless it only
  // continues, given back) everything.
  bool Compress(std::string_view bytes, ZSTD_EndDirective directive) {
    ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
    size_t left = 0;
    do {
      ZSTD_outBuffer produced{out.data(), out.size(), 0};
      left = ZSTD_compressStream2(zstd, &produced, &in, directive);
      if (ZSTD_isError(left)) return ok = false;
      if (produced.pos > 0 && !sink({out.data(), produced.pos})) return ok = false;
    } while (directive == ZSTD_e_continue ? in.pos < in.size : left > 0);
    return ok;
  }
};

RecordingWriter::RecordingWriter(Sink sink, int zstd_level) : state_(std::make_unique<State>()) {
  state_->sink = std::move(sink);
  ZSTD_CCtx_setParameter(state_->zstd, ZSTD_c_compressionLevel, zstd_level);
  ZSTD_CCtx_setParameter(state_->zstd, ZSTD_c_checksumFlag, 1);
  state_->ok = state_->zstd != nullptr && state_->sink(kRecordingMagic);
}

RecordingWriter::~RecordingWriter() { ZSTD_freeCCtx(state_->zstd); }

bool RecordingWriter::Write(const v1::RecordedMessage& message) {
  if (!state_->ok) return false;
  std::string& scratch = state_->scratch;
  uint8_t prefix[10];
  const uint8_t* end = google::protobuf::io::CodedOutputStream::WriteVarint32ToArray(
      static_cast<uint32_t>(message.ByteSizeLong()), prefix);
  scratch.assign(reinterpret_cast<char*>(prefix), static_cast<size_t>(end - prefix));
  {
    google::protobuf::io::StringOutputStream stream(&scratch);
    google::protobuf::io::CodedOutputStream out(&stream);
    out.SetSerializationDeterministic(true);  // Labels are a map: the same run, the same bytes.
    message.SerializeWithCachedSizes(&out);
  }
  return state_->Compress(scratch, ZSTD_e_continue);
}

bool RecordingWriter::Flush() { return state_->ok && state_->Compress({}, ZSTD_e_flush); }

bool RecordingWriter::Finish() {
  if (!state_->ok || !state_->Compress({}, ZSTD_e_end)) return false;
  state_->ok = false;
  return true;
}

struct RecordingReader::State {
  uint32_t message_bytes_max;
  ZSTD_DCtx* zstd = ZSTD_createDCtx();
  std::vector<char> out = std::vector<char>(ZSTD_DStreamOutSize());
  std::string compressed;
  size_t compressed_pos = 0;
  std::string plain;
  size_t plain_pos = 0;
  size_t magic_seen = 0;
  bool stream_ended = false;
  bool output_pending = false;  // zstd filled `out` and may hold more.
  std::string error;

  bool TakeMagic() {
    while (magic_seen < kRecordingMagic.size() && compressed_pos < compressed.size()) {
      if (compressed[compressed_pos] != kRecordingMagic[magic_seen]) {
        error = magic_seen + 1 == kRecordingMagic.size() ? "not a .bwrun version this program reads (1)"
                                                         : "not a .bwrun file: wrong first bytes";
        return false;
      }
      ++compressed_pos;
      ++magic_seen;
    }
    return true;
  }

  // Decompresses one more piece.  False if there is nothing to decompress.
  bool Decompress() {
    if (stream_ended || (compressed_pos == compressed.size() && !output_pending)) return false;
    ZSTD_inBuffer in{compressed.data(), compressed.size(), compressed_pos};
    ZSTD_outBuffer produced{out.data(), out.size(), 0};
    const size_t left = ZSTD_decompressStream(zstd, &produced, &in);
    compressed_pos = in.pos;
    if (ZSTD_isError(left)) {
      error = std::string("damaged .bwrun: ") + ZSTD_getErrorName(left);
      return false;
    }
    stream_ended = left == 0;
    output_pending = produced.pos == out.size();
    plain.erase(0, plain_pos);
    plain_pos = 0;
    plain.append(out.data(), produced.pos);
    return true;
  }
};

RecordingReader::RecordingReader(uint32_t message_bytes_max) : state_(std::make_unique<State>()) {
  state_->message_bytes_max = message_bytes_max;
}
RecordingReader::~RecordingReader() { ZSTD_freeDCtx(state_->zstd); }

void RecordingReader::Feed(std::string_view bytes) {
  state_->compressed.erase(0, state_->compressed_pos);
  state_->compressed_pos = 0;
  state_->compressed.append(bytes);
}

const std::string& RecordingReader::error() const { return state_->error; }

RecordingReader::Result RecordingReader::Next(v1::RecordedMessage* message) {
  State& s = *state_;
  if (!s.error.empty() || !s.TakeMagic()) return Result::kError;
  for (;;) {
    const auto* begin = reinterpret_cast<const uint8_t*>(s.plain.data()) + s.plain_pos;
    const size_t have = s.plain.size() - s.plain_pos;
    google::protobuf::io::CodedInputStream in(begin, static_cast<int>(std::min<size_t>(have, 10)));
    uint32_t size = 0;
    if (have > 0 && in.ReadVarint32(&size)) {
      const size_t prefix = static_cast<size_t>(in.CurrentPosition());
      if (size > s.message_bytes_max) {
        s.error = "damaged .bwrun: a message of " + std::to_string(size) + " bytes, at most " +
                  std::to_string(s.message_bytes_max) + " are allowed";
        return Result::kError;
      }
      if (have - prefix >= size) {
        if (!message->ParseFromArray(begin + prefix, static_cast<int>(size))) {
          s.error = "damaged .bwrun: a message cannot be parsed";
          return Result::kError;
        }
        s.plain_pos += prefix + size;
        return Result::kMessage;
      }
    } else if (have >= 10) {
      s.error = "damaged .bwrun: a length cannot be parsed";
      return Result::kError;
    }
    if (!s.Decompress()) {
      if (!s.error.empty()) return Result::kError;
      if (!s.stream_ended) return Result::kNeedMore;
      const bool whole = s.plain_pos == s.plain.size();
      if (whole && s.compressed_pos == s.compressed.size()) return Result::kEnd;
      s.error = whole ? "damaged .bwrun: bytes follow its end" : "damaged .bwrun: ends within a message";
      return Result::kError;
    }
  }
}

}  // namespace bellwether
