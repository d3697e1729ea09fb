#include "tessera/debug/visualize_sharding.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/detail/shard.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <vector>

namespace tessera {
namespace {

using Span = std::pair<int64_t, int64_t>;  // [begin, end)
using Spans = std::vector<Span>;

struct DrawnSharding {
  c10::IntArrayRef sizes;
  const DeviceMesh& mesh;
  Placements placements;
  Sizes dims;  // to be drawn: rows, or rows and columns

  // The indices of the n-th drawn dim that the rank at `coordinate` has. A missing dim has one index.
  Spans spans(size_t n, c10::IntArrayRef coordinate) const {
    if (n >= dims.size()) return {{0, 1}};
    Spans spans;
    for (const auto& [begin, end] : local_ranges(placements, mesh.shape(), coordinate, dims[n], sizes[dims[n]]))
      if (begin < end) spans.emplace_back(begin, end);
    return spans;
  }
};

Sizes dims_to_draw(c10::IntArrayRef sizes, c10::IntArrayRef dims) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  Sizes drawn;
  if (dims.empty()) {
    TESSERA_CHECK(ndim <= 2, UsageError, "visualize_sharding draws one or two dims, but a tensor of sizes ", sizes,
                  " has ", ndim, "; select dims: visualize_sharding(t, {0, ", ndim - 1, "})");
    for (int64_t d = 0; d < ndim; d++) drawn.push_back(d);
    return drawn;
  }
  for (auto d : dims) {
    TESSERA_CHECK(d >= -ndim && d < ndim, UsageError, "visualize_sharding: a tensor of sizes ", sizes, " has no dim ",
                  d);
    drawn.push_back(d < 0 ? d + ndim : d);
  }
  TESSERA_CHECK(drawn.size() == 1 || (drawn.size() == 2 && drawn[0] != drawn[1]), UsageError,
                "visualize_sharding draws one dim or two different dims; found ", dims);
  return drawn;
}

// Left-aligned columns below a line of dashes, with headers padded by two, as Python's tabulate formats them.
std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& header : rows[0]) widths.push_back(header.size() + 2);
  for (const auto& row : rows)
    for (size_t c = 0; c < row.size(); c++) widths[c] = std::max(widths[c], row[c].size());
  std::string text;
  auto add_line = [&](auto cell) {
    std::string line;
    for (size_t c = 0; c < widths.size(); c++) {
      std::string content = cell(c);
      content.resize(widths[c], ' ');
      line += (c ? "  " : "") + content;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  add_line([&](size_t c) { return rows[0][c]; });
  add_line([&](size_t c) { return std::string(widths[c], '-'); });
  for (size_t r = 1; r < rows.size(); r++) add_line([&](size_t c) { return rows[r][c]; });
  return text;
}

std::string header(const char* what, const Span& span) { return c10::str(what, " ", span.first, "-", span.second - 1); }

// Two ranks have either the same spans or no common index. So the spans that occur partition each dim.
std::string draw(const DrawnSharding& layout) {
  const auto& mesh = layout.mesh;
  std::map<std::pair<Span, Span>, std::string> cells;
  std::map<Span, bool> rows, columns;
  std::vector<std::string> idle;
  Sizes coordinate(mesh.ndim(), 0);
  for (auto rank : mesh.ranks()) {  // row-major
    const auto mine_down = layout.spans(0, coordinate), mine_across = layout.spans(1, coordinate);
    for (const auto& down : mine_down)
      for (const auto& across : mine_across) {
        rows[down], columns[across];
        auto& cell = cells[{down, across}];
        cell += cell.empty() ? c10::str(mesh.device_type(), ":", rank) : c10::str(",", rank);
      }
    if (mine_down.empty() || mine_across.empty()) idle.push_back(c10::str(rank));
    for (auto axis = mesh.ndim() - 1; axis >= 0; axis--) {
      if (++coordinate[axis] < mesh.shape()[axis]) break;
      coordinate[axis] = 0;
    }
  }

  std::string text;
  if (!cells.empty()) {
    std::vector<std::vector<std::string>> table{{""}};
    for (const auto& [across, unused] : columns) table[0].push_back(header("Col", across));
    for (const auto& [down, unused] : rows) {
      table.push_back({header("Row", down)});
      for (const auto& [across, unused_too] : columns) table.back().push_back(cells[{down, across}]);
    }
    text = format_table(table);
  }
  if (!idle.empty()) text += c10::str("nothing on ", mesh.device_type(), ":", c10::Join(",", idle), "\n");
  for (int64_t axis = 0; axis < mesh.ndim(); axis++)
    if (layout.placements[axis].is_partial())
      text += c10::str("partial over ", mesh.state()->axis_name(axis), ": ", layout.placements[axis], "\n");
  return text;
}

}  // namespace

std::string visualize_sharding(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements,
                               c10::IntArrayRef dims) {
  TESSERA_CHECK(mesh, UsageError, "visualize_sharding: no mesh given");
  TESSERA_CHECK(static_cast<int64_t>(placements.size()) == mesh.ndim(), UsageError, "visualize_sharding: mesh(", mesh,
                ") has ", mesh.ndim(), " axes, but ", placements.size(), " placements are given; write one per axis");
  const DrawnSharding layout{sizes, mesh, normalize(placements, static_cast<int64_t>(sizes.size())),
                             dims_to_draw(sizes, dims)};
  return c10::str(sizes, to_string(layout.placements), " on mesh(", mesh, ")\n", draw(layout));
}

std::string visualize_sharding(const at::Tensor& dtensor, c10::IntArrayRef dims) {
  TESSERA_CHECK(is_dtensor(dtensor), UsageError,
                "visualize_sharding: the tensor is plain or undefined; "
                "call distribute_tensor() first");
  const auto& spec = DTensor(dtensor).spec();
  return c10::str(spec.describe(), "\n",
                  draw({spec.sizes, spec.mesh, spec.placements, dims_to_draw(spec.sizes, dims)}));
}

}  // namespace tessera
