#include "server/store/wal_recovery.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/store/wal_format.h"
#include "server/store/wal_scan.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

struct OpenSegment {
  uint64_t number = 0;
  std::string name, path;
  std::unique_ptr<File> file;
  int64_t bytes = 0;       // Of the file.
  int64_t bytes_told = 0;  // By the header.
  bool header_lost = false;
  Lsn first_lsn = 0;
  SegmentScan scan;
  int64_t torn_bytes = 0;  // Cut off at scan.end.

  bool cut() const { return bytes < bytes_told; }
  // Where the next record belongs, also if the last one's padding is cut off.
  int64_t next() const { return (scan.end + 7) & ~int64_t{7}; }
};

std::string Range(Lsn from, Lsn to) {
  return from == to ? absl::StrCat("LSN ", from) : absl::StrCat("LSN ", from, "-", to);
}

class Recoverer {
 public:
  Recoverer(const Wal::Options& options, FileSystem* file_system) : options_(options), fs_(file_system) {}

  absl::StatusOr<RecoveredWal> Run() {
    BW_RETURN_IF_ERROR(OpenSegments());
    if (segments_.empty()) {
      RecoveredWal empty;
      empty.salt = std::random_device()();
      return empty;
    }
    for (size_t i = 0; i < segments_.size(); ++i) BW_RETURN_IF_ERROR(Scan(i));
    BW_RETURN_IF_ERROR(DropGivenUp());
    BW_RETURN_IF_ERROR(ScanTheFirstAgain());
    BW_RETURN_IF_ERROR(Judge());
    if (!damage_.empty()) {
      const std::string lost = absl::StrJoin(damage_, "; ");
      if (!options_.repair) {
        return absl::DataLossError(absl::StrCat("the log in ", options_.directory, " is damaged: ", lost,
                                                ". Nothing was changed; --repair goes on without these records"));
      }
      for (const auto& repair : repairs_) BW_RETURN_IF_ERROR(repair());
      BW_RETURN_IF_ERROR(fs_->SyncDirectory(options_.directory));
      Wal::Options again = options_;
      again.repair = false;
      BW_ASSIGN_OR_RETURN(RecoveredWal repaired, Recoverer(again, fs_).Run());
      repaired.recovery.lost = lost;
      return repaired;
    }
    return Settle();
  }

 private:
  absl::Status OpenSegments() {
    BW_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs_->List(options_.directory));
    for (const std::string& name : names) {
      OpenSegment segment;
      uint32_t salt = 0;
      segment.name = name;
      segment.path = absl::StrCat(options_.directory, "/", name);
      if (absl::EndsWith(name, ".tmp")) {
        BW_RETURN_IF_ERROR(fs_->Remove(segment.path));
        continue;
      }
      if (!ParseSegmentName(name, &segment.number, &salt)) continue;
      if (!segments_.empty() && salt != salt_) {
        return absl::DataLossError(absl::StrCat(options_.directory, " holds segments of two logs: ", segments_[0].name,
                                                " and ", name, ". Move one log's away"));
      }
      salt_ = salt;
      BW_ASSIGN_OR_RETURN(segment.file, fs_->Open(segment.path));
      BW_ASSIGN_OR_RETURN(segment.bytes, segment.file->Size());
      segments_.push_back(std::move(segment));
    }
    std::sort(segments_.begin(), segments_.end(),
              [](const OpenSegment& a, const OpenSegment& b) { return a.number < b.number; });
    return absl::OkStatus();
  }

  // `known_first`: what a record elsewhere says that it begins with; 0 = nothing.
  absl::Status Scan(size_t i, Lsn known_first = 0) {
    OpenSegment& segment = segments_[i];
    buffer_.resize(static_cast<size_t>(segment.bytes));
    BW_ASSIGN_OR_RETURN(const size_t got, segment.file->ReadAt(0, buffer_.size(), buffer_.data()));
    if (got != buffer_.size()) return absl::InternalError(absl::StrCat(segment.path, " shrank while it was read"));
    const std::string_view bytes(buffer_);
    const auto header = DecodeSegmentHeader(bytes.substr(0, static_cast<size_t>(kSegmentHeaderBytes)), salt_);
    if (header) {
      if (header->version != kWalVersion) {
        return absl::FailedPreconditionError(absl::StrCat(segment.path, " is of version ", header->version,
                                                          ", this server reads version ", kWalVersion));
      }
      if (header->number != segment.number) {
        return absl::DataLossError(absl::StrCat(segment.path, " holds segment ", header->number,
                                                ": files were renamed. Nothing was changed; rename them back"));
      }
      segment.first_lsn = header->first_lsn;
      segment.bytes_told = header->segment_bytes;
    } else {
      segment.header_lost = true;
      segment.bytes_told = std::max(options_.segment_bytes, segment.bytes);
      segment.first_lsn = i > 0 ? segments_[i - 1].scan.next_lsn : std::max<Lsn>(known_first, 1);
      RecordView first;
      if (known_first == 0 && segment.bytes > kSegmentHeaderBytes &&
          ParseRecord(bytes.substr(static_cast<size_t>(kSegmentHeaderBytes)), salt_, &first)) {
        segment.first_lsn = std::max(segment.first_lsn, first.lsn);  // A lower one is an older segment's.
      }
    }
    segment.scan = ScanSegment(bytes, salt_, segment.first_lsn);
    if (i + 1 == segments_.size()) CutTornTail(&segment);
    return absl::OkStatus();
  }

  // In the last segment what nobody was told to be durable ends the log.
  void CutTornTail(OpenSegment* segment) {
    const Lsn durable = std::max(segment->scan.durable_lsn, segment->first_lsn - 1);
    const auto torn = std::find_if(segment->scan.holes.begin(), segment->scan.holes.end(),
                                   [durable](const SegmentHole& hole) { return hole.from > durable; });
    if (torn != segment->scan.holes.end()) {
      const int64_t begin = torn->begin;
      segment->torn_bytes = segment->scan.end + segment->scan.dirty_bytes - begin;
      std::fill_n(buffer_.begin() + begin, segment->torn_bytes, '\0');
      segment->scan = ScanSegment(buffer_, salt_, segment->first_lsn);
    } else {
      segment->torn_bytes = segment->scan.dirty_bytes;
    }
  }

  // A truncation that a crash interrupted is finished here.
  absl::Status DropGivenUp() {
    for (const OpenSegment& segment : segments_) {
      if (segment.scan.keep_segment >= keep_segment_) {
        keep_segment_ = std::max<uint64_t>(segment.scan.keep_segment, 1);
        keep_lsn_ = std::max<Lsn>(segment.scan.keep_lsn, 1);
      }
    }
    size_t drop = 0;
    while (drop + 1 < segments_.size() && segments_[drop].number < keep_segment_) ++drop;
    for (size_t i = 0; i < drop; ++i) BW_RETURN_IF_ERROR(fs_->Remove(segments_[i].path));
    segments_.erase(segments_.begin(), segments_.begin() + static_cast<ptrdiff_t>(drop));
    return absl::OkStatus();
  }

  // Without its header the first segment seemed to begin with the first record that lies
  // there.  Damage may hide that record, and it may be an older segment's (wal_format.h).
  absl::Status ScanTheFirstAgain() {
    if (segments_[0].number != keep_segment_) return absl::OkStatus();
    for (size_t i = 0; i < segments_.size() && segments_[i].header_lost; ++i) {
      BW_RETURN_IF_ERROR(Scan(i, i == 0 ? keep_lsn_ : 0));
    }
    return absl::OkStatus();
  }

  absl::Status Judge() {
    if (segments_[0].number > keep_segment_) Missing(keep_segment_, keep_lsn_, segments_[0]);
    for (size_t i = 0; i < segments_.size(); ++i) {
      OpenSegment& segment = segments_[i];
      const bool last = i + 1 == segments_.size();
      for (const SegmentHole& hole : segment.scan.holes) Hole(&segment, hole);
      if (segment.cut()) {
        Cut(&segment, last);
        if (last) break;
      }
      if (last) break;
      const OpenSegment& next = segments_[i + 1];
      if (next.number != segment.number + 1) {
        Missing(segment.number + 1, segment.scan.next_lsn, next);
      } else if (next.first_lsn > segment.scan.next_lsn) {
        const int64_t begin = segment.next();
        Hole(&segment, {begin, begin + kRecordHeaderBytes, segment.scan.next_lsn, next.first_lsn - 1});
      } else if (next.first_lsn < segment.scan.next_lsn) {
        return absl::DataLossError(absl::StrCat(next.path, " begins at LSN ", next.first_lsn, ", but ", segment.name,
                                                " already ends at ", segment.scan.next_lsn - 1,
                                                ": not files of one log. Nothing was changed"));
      }
    }
    return absl::OkStatus();
  }

  void Hole(OpenSegment* segment, const SegmentHole& hole) {
    damage_.push_back(absl::StrCat("segment ", segment->name, ", offset ", hole.begin, ": ",
                                   hole.from > hole.to ? "garbage between records" : Range(hole.from, hole.to)));
    repairs_.push_back([this, segment, hole] {
      // Fills the hole exactly, so that nothing after it moves.
      std::string bytes;
      const std::string zeros(static_cast<size_t>(hole.end - hole.begin - kRecordHeaderBytes), '\0');
      RecordView gap{.lsn = hole.to, .kind = WalKind::kNone, .control = WalControl::kGap, .seq = hole.from};
      gap.payload = zeros;
      AppendRecord(gap, salt_, &bytes);
      BW_RETURN_IF_ERROR(segment->file->WriteAt(hole.begin, bytes));
      return segment->file->Sync();
    });
  }

  // What stood behind the records of the last segment is unknown; no more LSNs than the
  // record that this returns covers fitted there, and none of them may be given again.
  Lsn LastBehind(const OpenSegment& segment) const {
    return segment.scan.next_lsn + static_cast<Lsn>((segment.bytes_told - segment.next()) / kRecordHeaderBytes);
  }
  std::string GapBehind(const OpenSegment& segment) const {
    std::string bytes;
    if (segment.next() + kRecordHeaderBytes <= segment.bytes_told) {
      AppendRecord({.lsn = LastBehind(segment),
                    .kind = WalKind::kNone,
                    .control = WalControl::kGap,
                    .seq = segment.scan.next_lsn},
                   salt_, &bytes);
    }
    return bytes;
  }

  void Cut(OpenSegment* segment, bool last) {
    damage_.push_back(absl::StrCat(
        "segment ", segment->name, " was cut to ", segment->bytes, " of ", segment->bytes_told, " bytes",
        last ? absl::StrCat(": LSN ", segment->scan.next_lsn, " and all after it, if any") : std::string()));
    std::string bytes = last ? GapBehind(*segment) : std::string();
    bytes.resize(static_cast<size_t>(segment->bytes_told - segment->next()), '\0');
    repairs_.push_back([this, segment, bytes]() -> absl::Status {
      BW_RETURN_IF_ERROR(WriteHeader(*segment));
      BW_RETURN_IF_ERROR(segment->file->WriteAt(segment->next(), bytes));
      return segment->file->Sync();
    });
  }

  // Segments [number, next.number) are not there.
  void Missing(uint64_t number, Lsn from, const OpenSegment& next) {
    damage_.push_back(
        absl::StrCat("segments ", number, "-", next.number - 1, " are missing: ", Range(from, next.first_lsn - 1)));
    repairs_.push_back([this, number, from, &next]() -> absl::Status {
      for (uint64_t i = number; i < next.number; ++i) {
        const int64_t size = kSegmentHeaderBytes + kRecordHeaderBytes;
        const bool holds_gap = i == number && from < next.first_lsn;
        std::string bytes = EncodeSegmentHeader(
            {.number = i, .first_lsn = i == number ? from : next.first_lsn, .segment_bytes = size}, salt_);
        if (holds_gap) {
          AppendRecord({.lsn = next.first_lsn - 1, .kind = WalKind::kNone, .control = WalControl::kGap, .seq = from},
                       salt_, &bytes);
        }
        const std::string path = absl::StrCat(options_.directory, "/", SegmentName(i, salt_));
        BW_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs_->Create(path + ".tmp", size));
        BW_RETURN_IF_ERROR(file->WriteAt(0, bytes));
        BW_RETURN_IF_ERROR(file->Sync());
        BW_RETURN_IF_ERROR(fs_->Rename(path + ".tmp", path));
      }
      return absl::OkStatus();
    });
  }

  absl::Status WriteHeader(const OpenSegment& segment) {
    return segment.file->WriteAt(
        0, EncodeSegmentHeader(
               {.number = segment.number, .first_lsn = segment.first_lsn, .segment_bytes = segment.bytes_told}, salt_));
  }

  // Nothing is lost: make what was found durable and clean.
  absl::StatusOr<RecoveredWal> Settle() {
    RecoveredWal result;
    result.salt = salt_;
    for (OpenSegment& segment : segments_) {
      if (segment.header_lost) {
        LogWarning("log segment {}: both headers were unreadable and are written anew; no record is lost",
                   segment.path);
        BW_RETURN_IF_ERROR(WriteHeader(segment));
        BW_RETURN_IF_ERROR(segment.file->Sync());
      }
      if (&segment == &segments_.back()) {  // Behind the records of the others nothing is written again.
        BW_RETURN_IF_ERROR(ZeroTail(segment));
        // Records that a killed process wrote and never synced are only in the
        // page cache: they may be reported durable after this, not before.
        BW_RETURN_IF_ERROR(segment.file->Sync());
      }
      result.recovery.records += segment.scan.records;
      result.recovery.bytes += segment.scan.end - kSegmentHeaderBytes;
      result.segments.push_back({segment.number, segment.path, segment.first_lsn, segment.scan.end, segment.bytes});
    }
    BW_RETURN_IF_ERROR(fs_->SyncDirectory(options_.directory));
    result.next_lsn = segments_.back().scan.next_lsn;
    result.recovery.torn_bytes = segments_.back().torn_bytes;
    result.recovery.last_lsn = result.next_lsn - 1;
    result.recovery.first_lsn = result.recovery.records > 0 ? segments_[0].first_lsn : 0;
    return result;
  }

  // A record beyond the tail that is later overwritten only in part would be
  // taken for the log's once the LSNs before it are given again.
  absl::Status ZeroTail(const OpenSegment& segment) {
    if (segment.torn_bytes == 0) return absl::OkStatus();
    LogWarning("log segment {}: {} bytes after LSN {} were never acknowledged and are cut off", segment.path,
               segment.torn_bytes, segment.scan.next_lsn - 1);
    return segment.file->WriteAt(segment.scan.end, std::string(static_cast<size_t>(segment.torn_bytes), '\0'));
  }

  const Wal::Options& options_;
  FileSystem* const fs_;
  uint32_t salt_ = 0;
  std::vector<OpenSegment> segments_;
  std::string buffer_;
  uint64_t keep_segment_ = 1;
  Lsn keep_lsn_ = 1;
  std::vector<std::string> damage_;
  std::vector<std::function<absl::Status()>> repairs_;
};

}  // namespace

absl::StatusOr<RecoveredWal> RecoverWal(const Wal::Options& options, FileSystem* file_system) {
  return Recoverer(options, file_system).Run();
}

}  // namespace bellwether::server
