#include "tessera/compile/detail/report/curve_svg.h"

#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/report/html.h"

#include <algorithm>
#include <ostream>

namespace tessera::compiler {
namespace {

// (0, 0) is top left. The browser stretches the picture to the width of the page.
constexpr double kWidth = 1000, kHeight = 220, kTicks = 12;

struct CurveScale {
  double per_node, per_byte;
  double x(size_t node) const { return static_cast<double>(node) * per_node; }
  double y(int64_t bytes) const { return kHeight - static_cast<double>(bytes) * per_byte; }
};

// A step curve with one step per node. Nodes that do not change the height add no corner.
void write_area(std::ostream& out, const CurveScale& scale, const std::vector<int64_t>& bytes, const char* style) {
  out << "<path class=" << style << " d=\"M0 " << kHeight;
  for (size_t n = 0; n < bytes.size(); n++)
    if (n == 0 || bytes[n] != bytes[n - 1]) out << "H" << scale.x(n) << "V" << scale.y(bytes[n]);
  out << "H" << scale.x(bytes.size()) << "V" << kHeight << "Z\"/>\n";
}

}  // namespace

void write_curve(std::ostream& out, const Program& program, const MemoryCurve& curve, const MemoryPlan& plan) {
  const auto nodes = std::max<size_t>(curve.own.size(), 1);
  const auto top = std::max<int64_t>({curve.peak(), plan.arena_bytes, 1});
  const CurveScale scale{kWidth / static_cast<double>(nodes), kHeight / 1.05 / static_cast<double>(top)};
  out << "<svg id=curve viewBox=\"0 0 " << kWidth << " " << kHeight + kTicks
      << "\" preserveAspectRatio=\"none\" role=img aria-label=\"memory in use at each node\">\n";
  write_area(out, scale, curve.own, "own");
  write_area(out, scale, curve.arena, "arena");
  out << "<path class=limit d=\"M0 " << scale.y(plan.arena_bytes) << "H" << kWidth << "\"/>\n<path class=comm d=\"";
  for (size_t n = 0; n < program.nodes.size(); n++)
    if (kind_of(program.nodes[n]) == OpKind::Collective)
      out << "M" << scale.x(n) + scale.per_node / 2 << " " << kHeight + 1 << "V" << kHeight + kTicks;
  out << "\"/>\n<path class=cursor id=cursor d=\"\"/>\n</svg>\n";
  out << "<p class=legend><span class=own></span> allocated by the program, peak " << html::bytes(curve.peak())
      << " <span class=arena></span> of these in the arena <span class=limit></span> the arena: "
      << html::bytes(plan.arena_bytes) << " for buffers of " << html::bytes(plan.total_bytes)
      << " <span class=comm></span> collectives</p>\n<p id=here></p>\n";
}

}  // namespace tessera::compiler
