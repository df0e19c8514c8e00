#include "server/store/wal_read.h"

#include <algorithm>
#include <memory>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "server/store/wal_format.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int64_t kHeadsReadBytes = 1 << 20;
constexpr int64_t kCopyBytes = 1 << 20;

}  // namespace

absl::Status ReadRecords(FileSystem* file_system, const std::vector<WalSegment>& segments, uint32_t salt, Lsn from,
                         Lsn until, const std::function<absl::Status(const WalRecord&)>& visit) {
  std::string buffer;
  WalRecord record;
  for (size_t i = 0; i < segments.size(); ++i) {
    const WalSegment& segment = segments[i];
    if (segment.first_lsn > until) break;
    if (i + 1 < segments.size() && segments[i + 1].first_lsn <= from) continue;
    BW_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, file_system->Open(segment.path));
    buffer.resize(static_cast<size_t>(segment.end - kSegmentHeaderBytes));
    BW_ASSIGN_OR_RETURN(const size_t got, file->ReadAt(kSegmentHeaderBytes, buffer.size(), buffer.data()));
    std::string_view rest(buffer.data(), got);
    while (!rest.empty()) {
      RecordView view;
      if (!ParseRecord(rest, salt, &view)) {
        return absl::DataLossError(absl::StrCat("log segment ", segment.path, ", offset ",
                                                segment.end - static_cast<int64_t>(rest.size()),
                                                ": a record went bad since the log was opened"));
      }
      rest.remove_prefix(static_cast<size_t>(RecordBytes(view.payload.size())));
      if (view.lsn > until) return absl::OkStatus();
      if (view.lsn < from || view.kind == WalKind::kNone) continue;
      FillRecord(view, &record);
      record.payload.assign(view.payload);
      BW_RETURN_IF_ERROR(visit(record));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadRecordHeads(FileSystem* file_system, const std::vector<WalSegment>& segments, Lsn until,
                             const std::function<absl::Status(const WalRecord&)>& visit) {
  std::string buffer(static_cast<size_t>(kHeadsReadBytes), '\0');
  WalRecord record;
  for (const WalSegment& segment : segments) {
    BW_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, file_system->Open(segment.path));
    std::string_view rest;
    for (int64_t offset = kSegmentHeaderBytes; offset < segment.end;) {
      RecordView view;
      int64_t size = 0;
      bool known = ParseVerifiedRecord(rest, &view, &size);
      // What is not wholly in the buffer is read when it is wanted.
      if (!known || (view.kind == WalKind::kHello && static_cast<int64_t>(rest.size()) < size)) {
        buffer.resize(static_cast<size_t>(std::max(kHeadsReadBytes, size)));
        BW_ASSIGN_OR_RETURN(const size_t got, file->ReadAt(offset, buffer.size(), buffer.data()));
        rest = std::string_view(buffer.data(), got);
        known = ParseVerifiedRecord(rest, &view, &size);
      }
      if (!known) {
        return absl::DataLossError(absl::StrCat("log segment ", segment.path, ", offset ", offset,
                                                ": a record went bad since it was verified"));
      }
      offset += size;
      rest.remove_prefix(std::min(rest.size(), static_cast<size_t>(size)));
      if (view.lsn > until) return absl::OkStatus();
      if (view.kind == WalKind::kNone) continue;
      FillRecord(view, &record);
      record.payload.assign(view.kind == WalKind::kHello ? view.payload : std::string_view());
      BW_RETURN_IF_ERROR(visit(record));
    }
  }
  return absl::OkStatus();
}

absl::Status CopySegments(FileSystem* file_system, const std::vector<WalSegment>& segments, const std::string& from,
                          const std::string& to) {
  BW_RETURN_IF_ERROR(file_system->MakeDirectory(to));
  std::string buffer;
  for (const WalSegment& segment : segments) {
    BW_ASSIGN_OR_RETURN(const std::unique_ptr<File> source, file_system->Open(segment.path));
    const std::string path = to + segment.path.substr(from.size());
    // What lies behind the durable end is left out: it may be half written.
    BW_ASSIGN_OR_RETURN(const std::unique_ptr<File> target, file_system->Create(path, segment.bytes));
    for (int64_t offset = 0; offset < segment.end;) {
      buffer.resize(static_cast<size_t>(std::min(kCopyBytes, segment.end - offset)));
      BW_ASSIGN_OR_RETURN(const size_t got, source->ReadAt(offset, buffer.size(), buffer.data()));
      if (got != buffer.size()) return absl::DataLossError(absl::StrCat(segment.path, " is shorter than it was"));
      BW_RETURN_IF_ERROR(target->WriteAt(offset, buffer));
      offset += static_cast<int64_t>(got);
    }
    BW_RETURN_IF_ERROR(target->Sync());
  }
  return file_system->SyncDirectory(to);
}

}  // namespace bellwether::server
