// halve SOURCE TARGET [PREFIX]
//
// Loads a network from a checkpoint of any format that torch_ckpt reads, halves
// its weights, and saves it as a checkpoint. There is no Python in it.
// PREFIX stands before the names of the network's tensors in SOURCE, as
// "model." in a checkpoint of {"model": net.state_dict()}.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <exception>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// Calls torch.ops.dcp_ext.<name>, with all of its arguments.
torch::jit::Stack Call(const std::string& name, torch::jit::Stack stack) {
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(("dcp_ext::" + name).c_str(), "")
      .callBoxed(&stack);
  return stack;
}

at::Tensor Plan(const std::string& path,
                const std::vector<std::string>& names) {
  return Call("plan", {path, c10::List<std::string>(names), "{}"})[0]
      .toTensor();
}

// Shapes by name.
std::map<std::string, std::vector<int64_t>> Describe(const std::string& path) {
  const torch::jit::Stack found = Call("describe", {Plan(path, {})});
  const auto names = found[0].toList(), dtypes = found[1].toList(),
             shapes = found[2].toList();
  std::map<std::string, std::vector<int64_t>> described;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string name = names.get(i).toStringRef();
    described[name] = shapes.get(i).toIntVector();
    std::cout << name << ": " << dtypes.get(i).toStringRef() << " "
              << at::IntArrayRef(described[name]) << std::endl;
  }
  return described;
}

// Rows and columns of a layer's weight.
std::vector<int64_t> SizesOf(
    const std::map<std::string, std::vector<int64_t>>& shapes,
    const std::string& name) {
  const auto found = shapes.find(name);
  if (found == shapes.end()) throw std::runtime_error("there is no " + name);
  if (found->second.size() != 2) {
    throw std::runtime_error(name + " is no matrix");
  }
  return found->second;
}

// Two layers of the sizes that the checkpoint says.
struct Net : torch::nn::Module {
  Net(const std::vector<int64_t>& first, const std::vector<int64_t>& second) {
    fc1 = register_module("fc1", torch::nn::Linear(first[1], first[0]));
    fc2 = register_module("fc2", torch::nn::Linear(second[1], second[0]));
  }
  at::Tensor forward(const at::Tensor& x) {
    return fc2->forward(at::relu(fc1->forward(x)));
  }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};

// The network's tensors, and their names behind `prefix`.
std::pair<std::vector<std::string>, c10::List<at::Tensor>> TensorsOf(
    const Net& net, const std::string& prefix) {
  std::vector<std::string> names;
  c10::List<at::Tensor> tensors;
  for (const auto& item : net.named_parameters()) {
    names.push_back(prefix + item.key());
    tensors.push_back(item.value());
  }
  return {names, tensors};
}

void Load(const Net& net, const std::string& path, const std::string& prefix) {
  const auto [names, tensors] = TensorsOf(net, prefix);
  Call("read", {tensors, Plan(path, names), at::zeros({4}, at::kLong)});
}

void Save(const Net& net, const std::string& path) {
  const auto [names, tensors] = TensorsOf(net, "");
  const at::Tensor report = at::zeros({4}, at::kLong);
  Call("save", {tensors, Plan(path, names), report});
  std::cout << "saved " << report[1].item<int64_t>() << " bytes to " << path
            << std::endl;
}

void Run(const std::string& source, const std::string& target,
         const std::string& prefix) {
  const torch::NoGradGuard no_grad;
  const auto shapes = Describe(source);
  const auto first = SizesOf(shapes, prefix + "fc1.weight");
  const auto second = SizesOf(shapes, prefix + "fc2.weight");
  Net net(first, second);
  Load(net, source, prefix);
  const at::Tensor ones = at::ones({1, net.fc1->weight.size(1)});
  std::cout << "the sum of net(1, ...) is "
            << net.forward(ones).sum().item<double>() << std::endl;
  for (at::Tensor& parameter : net.parameters()) parameter.mul_(0.5);
  Save(net, target);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    std::cerr << "usage: " << argv[0] << " SOURCE TARGET [PREFIX]\n";
    return 2;
  }
  try {
    Run(argv[1], argv[2], argc == 4 ? argv[3] : "");
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
