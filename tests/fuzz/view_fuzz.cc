// Views as people write them: what is taken of a shape is inside of it, and a
// name that is made is one that is meant. The input is a view, a line end, and
// a name; its last bytes are a shape.
#include <cstdlib>
#include <string_view>

#include "base/box.h"
#include "plan/box_map.h"
#include "plan/view.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kShapeBytes = 3;
  if (size < kShapeBytes) return 0;
  Dims shape;
  for (size_t i = size - kShapeBytes; i < size; ++i) {
    shape.push_back(data[i] % 13);
  }
  const std::string_view text(reinterpret_cast<const char*>(data),
                              size - kShapeBytes);
  const size_t line = text.find('\n');
  const auto view = View::Parse(text.substr(0, line));
  if (!view.ok()) return 0;
  Numbers numbers = {{"n", 2}};
  const std::string_view name =
      line == std::string_view::npos ? "" : text.substr(line + 1);
  if (view->Match(name, &numbers)) {
    if (!view->HasName(numbers) || view->Name(numbers) != name) abort();
  }
  Numbers ranges;
  const auto taken = view->Select(shape, numbers, &ranges);
  if (!taken.ok()) return 0;
  if (taken->at.size() != shape.size()) abort();
  for (const Selection::Axis& axis : taken->axes) {
    if (axis.dim < 0 || axis.dim >= shape.size() || axis.step < 1) abort();
  }
  for (const auto& [placeholder, count] : ranges) {
    if (count < 0) abort();
    if (count == 0) return 0;  // none of them is: nothing is taken
  }
  for (const Box& box : BoxesOf(*taken)) {
    if (!Inside(box, shape)) abort();
  }
  return 0;
}
