#include "cli/layout.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <numeric>

namespace bellwether::cli {
namespace {

constexpr size_t kGap = 2;           // Between two columns.
constexpr size_t kIndent = 4;        // Of what goes on below a line.
constexpr size_t kTextColumns = 30;  // A column of sentences has so many at least.

using Columns = std::vector<size_t>;

bool Holds(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string Painted(const std::string& text, int colour, bool colours) {
  if (colour < 0 || !colours || text.empty()) return text;
  return "\x1b[38;5;" + std::to_string(colour) + "m" + text + "\x1b[0m";
}

std::string Lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

class Layout {
 public:
  Layout(const Table& table, bool headers, size_t width, bool colours)
      : table_(table), headers_(headers), width_(width), colours_(colours), widths_(ColumnWidths(table, headers)) {}

  // Decides what stands where.
  void Arrange(std::vector<std::string>* left_out) {
    Columns shown(table_.columns.size());
    std::iota(shown.begin(), shown.end(), 0);
    if (width_ == 0 || (!table_.texts_below && Fits(shown))) {
      groups_ = {shown};
      return;
    }
    std::erase_if(shown, [this](size_t i) { return i > 0 && !table_.rows.empty() && SaysNothing(i); });
    for (const size_t i : shown) (IsText(i, shown) ? texts_ : fixed_).push_back(i);
    if (!table_.texts_below && Fits(shown)) {
      texts_.clear();
      groups_ = {shown};
      return;
    }
    const size_t taken = TakenBy(fixed_) + (fixed_.empty() ? 0 : kGap);
    if (!table_.texts_below && texts_.size() == 1 && texts_[0] == shown.back() &&
        taken + std::max(kTextColumns, width_ * 2 / 5) <= width_) {
      beside_ = width_ - taken;
      groups_ = {fixed_};
      return;
    }
    for (const std::string& name : table_.spare) {
      if (TakenBy(fixed_) <= width_) break;
      const auto is = [&](size_t i) { return table_.columns[i] == name; };
      if (std::erase_if(fixed_, is) > 0 && left_out != nullptr) left_out->push_back(name);
    }
    Fold();
  }

  std::vector<std::string> Lines() const {
    std::vector<std::string> lines;
    if (headers_) Header(&lines);
    for (const auto& row : table_.rows) Row(row, &lines);
    return lines;
  }

 private:
  size_t TakenBy(const Columns& columns) const {
    size_t taken = columns.empty() ? 0 : kGap * (columns.size() - 1);
    for (const size_t i : columns) taken += widths_[i];
    return taken;
  }
  size_t Room(size_t margin) const { return width_ > margin ? width_ - margin : 1; }
  bool Fits(const Columns& columns) const { return TakenBy(columns) <= width_; }
  bool SaysNothing(size_t column) const {
    return std::all_of(table_.rows.begin(), table_.rows.end(), [&](const std::vector<Cell>& row) {
      return column >= row.size() || row[column].text.empty() || row[column].text == "-";
    });
  }
  bool IsText(size_t column, const Columns& shown) const {
    if (!table_.texts.empty()) return Holds(table_.texts, table_.columns[column]);
    return column == shown.back() && shown.size() > 1;
  }

  // Lines of one row: as many columns in each as fit.
  void Fold() {
    size_t taken = 0;
    for (const size_t i : fixed_) {
      if (groups_.empty() || taken + kGap + widths_[i] > width_) {
        taken = groups_.empty() ? 0 : kIndent;
        groups_.emplace_back();
      } else {
        taken += kGap;
      }
      taken += widths_[i];
      groups_.back().push_back(i);
    }
  }

  std::string Plain(const std::vector<Cell>& cells, const Columns& columns) const {
    std::string line;
    for (size_t n = 0; n < columns.size(); ++n) {
      if (columns[n] >= cells.size()) continue;
      const std::string text = Clean(cells[columns[n]].text);
      line += Painted(text, cells[columns[n]].colour, colours_);
      if (n + 1 < columns.size() || beside_ > 0) line.append(widths_[columns[n]] + kGap - Width(text), ' ');
    }
    return line;
  }

  void Add(std::string line, std::vector<std::string>* lines) const {
    line.erase(line.find_last_not_of(' ') + 1);
    lines->push_back(std::move(line));
  }

  // The columns that have a place in the line; too wide a cell goes on in lines of its own.
  void Groups(const std::vector<Cell>& cells, std::vector<std::string>* lines) const {
    for (size_t g = 0; g < groups_.size(); ++g) {
      const std::string margin(g == 0 ? 0 : kIndent, ' ');
      const Columns& columns = groups_[g];
      if (width_ > 0 && columns.size() == 1 && columns[0] < cells.size() &&
          widths_[columns[0]] + margin.size() > width_) {
        for (const std::string& part : Wrap(Clean(cells[columns[0]].text), Room(margin.size()))) {
          Add(margin + Painted(part, cells[columns[0]].colour, colours_), lines);
        }
      } else {
        Add(margin + Plain(cells, columns), lines);
      }
    }
  }

  void Header(std::vector<std::string>* lines) const {
    const std::vector<Cell> names(table_.columns.begin(), table_.columns.end());
    if (beside_ > 0) {
      Add(Plain(names, groups_[0]) + table_.columns[texts_[0]], lines);
    } else {
      Groups(names, lines);
    }
  }

  void Row(const std::vector<Cell>& cells, std::vector<std::string>* lines) const {
    if (beside_ > 0) {
      const Cell& text = cells[texts_[0]];
      const size_t margin = width_ - beside_;
      bool first = true;
      for (const std::string& part : Wrap(Clean(text.text), beside_)) {
        Add((first ? Plain(cells, groups_[0]) : std::string(margin, ' ')) + Painted(part, text.colour, colours_),
            lines);
        first = false;
      }
      return;
    }
    Groups(cells, lines);
    for (const size_t i : texts_) {
      if (i >= cells.size() || cells[i].text.empty()) continue;
      const std::string name = texts_.size() > 1 ? Lower(table_.columns[i]) + ": " : "";
      size_t margin = kIndent;
      for (const std::string& part : Wrap(name + Clean(cells[i].text), Room(kIndent + (name.empty() ? 0 : 2)))) {
        Add(std::string(margin, ' ') + Painted(part, cells[i].colour, colours_), lines);
        margin = kIndent + (name.empty() ? 0 : 2);
      }
    }
  }

  const Table& table_;
  const bool headers_;
  const size_t width_;
  const bool colours_;
  const std::vector<size_t> widths_;
  Columns fixed_, texts_;
  std::vector<Columns> groups_;  // A line each.
  size_t beside_ = 0;            // Columns for the text in the line; 0 = texts stand below it.
};

}  // namespace

size_t Width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string Clean(const std::string& text) {
  std::string clean = text;
  for (char& c : clean) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) c = '?';
  }
  return clean;
}

std::string CutTo(const std::string& text, size_t width) {
  size_t columns = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((text[i] & 0xc0) == 0x80) continue;
    if (columns++ == width) return text.substr(0, i);
  }
  return text;
}

std::vector<std::string> Wrap(const std::string& text, size_t width) {
  width = std::max<size_t>(width, 1);
  std::vector<std::string> lines;
  std::string rest = text;
  while (Width(rest) > width) {
    const std::string head = CutTo(rest, width + 1);  // A blank may stand behind the last column.
    size_t end = head.find_last_of(' ');
    if (end == std::string::npos || end == 0) end = CutTo(rest, width).size();
    std::string line = rest.substr(0, end);
    line.erase(line.find_last_not_of(' ') + 1);
    lines.push_back(std::move(line));
    rest.erase(0, std::min(rest.find_first_not_of(' ', end), rest.size()));
  }
  if (!rest.empty() || lines.empty()) lines.push_back(std::move(rest));
  return lines;
}

std::vector<size_t> ColumnWidths(const Table& table, bool headers) {
  std::vector<size_t> widths;
  for (const std::string& column : table.columns) widths.push_back(headers ? Width(column) : 0);
  for (size_t i = 0; i < std::min(widths.size(), table.widths.size()); ++i) {
    widths[i] = std::max(widths[i], table.widths[i]);
  }
  for (const auto& row : table.rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(Clean(row[i].text)));
  }
  return widths;
}

std::vector<std::string> Lines(const Table& table, bool headers, size_t width, bool colours,
                               std::vector<std::string>* left_out) {
  Layout layout(table, headers, width, colours);
  layout.Arrange(left_out);
  return layout.Lines();
}

}  // namespace bellwether::cli
