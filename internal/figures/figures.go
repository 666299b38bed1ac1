// Package figures reads and writes the result lines of bench/results: one figure a line, in JSON,
// with its peer's value from the same run and the path of the log that holds both. The newest line
// of a name counts.
package figures

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Figure is one line of bench/results/*.jsonl.
type Figure struct {
	Name      string  `json:"name"`       // "cpu.decode_ratio.15m"
	Value     float64 `json:"value"`      // ours, in Unit
	Unit      string  `json:"unit"`       //
	Peer      string  `json:"peer"`       // what PeerValue is of
	PeerValue float64 `json:"peer_value"` // the peer's or the limit, in Unit
	Ratio     float64 `json:"ratio"`      // ours over the peer
	Device    string  `json:"device"`
	Model     string  `json:"model"`         // and the load: what was measured
	Command   string  `json:"command"`       // repeats it, from the repository's root
	Was       string  `json:"was,omitempty"` // what measured it, where that was not Command
	Commit    string  `json:"commit"`
	Date      string  `json:"date"`
	Runs      int     `json:"runs"`
	Spread    string  `json:"spread"`
	Raw       string  `json:"raw"` // the log, from the repository's root
}

// Book takes the figures of one run of a benchmark.
type Book struct {
	lines, raw            *os.File // nil: nothing is kept
	rawPath, date, commit string
	device                string
}

// Open appends to DIR/results/NAME.jsonl and DIR/raw/DATE-NAME.log, and begins a command's part of the
// log. Without a DIR the book keeps nothing.
func Open(dir, name, command string) (*Book, error) {
	b := &Book{date: time.Now().UTC().Format("2006-01-02"), device: Device()}
	if dir == "" {
		return b, nil
	}
	b.rawPath = filepath.Join(dir, "raw", b.date+"-"+name+".log")
	commit, err := exec.Command("git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		return nil, fmt.Errorf("git rev-parse: %w", err)
	}
	b.commit = strings.TrimSpace(string(commit))
	if b.raw, err = Append(b.rawPath); err != nil {
		return nil, err
	}
	if b.lines, err = Append(filepath.Join(dir, "results", name+".jsonl")); err != nil {
		b.raw.Close()
		return nil, err
	}
	b.Logf("\n# %s commit %s on %s: %s", time.Now().UTC().Format(time.RFC3339), b.commit, b.device, command)
	return b, nil
}

// On names another device than this machine's processor for the figures to come.
func (b *Book) On(device string) {
	b.device = device
	b.Logf("# on %s", device)
}

// Here reports which figures of DIR/results/NAME.jsonl were measured at a commit
// since which nothing under paths has changed.
func Here(dir, name string, paths ...string) (map[string]bool, error) {
	lines, err := os.Open(filepath.Join(dir, "results", name+".jsonl"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer lines.Close()
	newest := map[string]Figure{}
	if err := Newest(newest, lines); err != nil {
		return nil, fmt.Errorf("%s: %w", lines.Name(), err)
	}
	same, here := map[string]bool{}, map[string]bool{}
	for name, f := range newest {
		if _, known := same[f.Commit]; !known {
			same[f.Commit] = exec.Command("git", append([]string{"diff", "--quiet", f.Commit, "HEAD", "--"}, paths...)...).Run() == nil
		}
		here[name] = same[f.Commit]
	}
	return here, nil
}

// Append opens a file to append to, and makes its folder.
func Append(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	return os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
}

// Close closes both files.
func (b *Book) Close() error {
	if b.lines == nil {
		return nil
	}
	b.raw.Close()
	return b.lines.Close()
}

// Logf adds a line to the log. An error of the disk shows at the next Add.
func (b *Book) Logf(format string, args ...any) {
	if b.raw != nil {
		fmt.Fprintf(b.raw, format+"\n", args...)
	}
}

// Add writes f with this run's device, commit, date and log.
func (b *Book) Add(f Figure) error {
	f.Device, f.Commit, f.Raw, f.Date = b.device, b.commit, b.rawPath, b.date
	line, err := json.Marshal(f)
	if err != nil || b.lines == nil {
		return err
	}
	_, err = b.lines.Write(append(line, '\n'))
	return err
}

// Ratios fills in f from n paired runs: medians of both, the median of their
// ratios, and the spread.
func (f Figure) Ratios(ours, peer []float64) Figure {
	ratios := make([]float64, len(ours))
	for i := range ours {
		ratios[i] = ours[i] / peer[i]
	}
	f.Value, f.PeerValue, f.Ratio, f.Runs = Median(ours), Median(peer), Median(ratios), len(ours)
	f.Spread = fmt.Sprintf("ours %.4g..%.4g, peer %.4g..%.4g, ratio %.3f..%.3f", slices.Min(ours), slices.Max(ours),
		slices.Min(peer), slices.Max(peer), slices.Min(ratios), slices.Max(ratios))
	return f
}

// Compare measures two ways in turn, ours and its peer, in each round, so that what disturbs
// the machine disturbs both. It says each result.
func Compare[R fmt.Stringer](say func(format string, args ...any), rounds int, ways [2]string, measure func(round int, way string) (R, error)) (runs [2][]R, err error) {
	for n := range rounds {
		for i, way := range ways {
			r, err := measure(n, way)
			if err != nil {
				return runs, err
			}
			runs[i] = append(runs[i], r)
			say("round %d, %s: %v", n+1, way, r)
		}
	}
	return runs, nil
}

// RatiosOf fills in f from one number of each of the runs that Compare returned.
func RatiosOf[R any](f Figure, runs [2][]R, of func(R) float64) Figure {
	var v [2][]float64
	for i := range v {
		for _, r := range runs[i] {
			v[i] = append(v[i], of(r))
		}
	}
	return f.Ratios(v[0], v[1])
}

// Newest returns the newest figure of each name in r's lines and earlier's.
func Newest(earlier map[string]Figure, r io.Reader) error {
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		var f Figure
		if err := json.Unmarshal(lines.Bytes(), &f); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		earlier[f.Name] = f
	}
	return lines.Err()
}

// Median is the middle value, or the mean of the two in the middle.
func Median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// MedianWithin is the 95 % confidence interval of the median, by the sign test:
// it assumes nothing about the distribution of v. Fewer than six values give all of v.
func MedianWithin(v []float64) (low, high float64) {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	tail, term := 0.0, math.Pow(0.5, float64(n)) // P(X < k), P(X = k) of n fair coins
	k := 0
	for ; k < n/2 && tail+term <= 0.025; k++ {
		tail += term
		term *= float64(n-k) / float64(k+1)
	}
	k = max(k-1, 0)
	return s[k], s[n-1-k]
}

// Quantile is the value that a share q of v does not exceed.
func Quantile(v []float64, q float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[min(int(q*float64(len(s))), len(s)-1)]
}

// Device names this machine's processor.
func Device() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown CPU"
	}
	for line := range strings.Lines(string(info)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			flags := "no AVX-512"
			if strings.Contains(string(info), "avx512f") {
				flags = "AVX-512"
			}
			return fmt.Sprintf("%s, %d CPUs, %s", strings.Trim(name, "\t: \n"), strings.Count(string(info), "processor\t"), flags)
		}
	}
	return "unknown CPU"
}
