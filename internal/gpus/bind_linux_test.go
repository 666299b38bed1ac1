package gpus_test

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/gpus"
)

// threads are the CPUs on which the threads of this process may run, by /proc.
func threads(t *testing.T) map[string]int {
	t.Helper()
	files, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	by := map[string]int{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		for line := range strings.Lines(string(b)) {
			if v, ok := strings.CutPrefix(line, "Cpus_allowed_list:"); ok {
				by[strings.TrimSpace(v)]++
			}
		}
	}
	return by
}

// TestBind: all threads are bound, those of the past and of the future, and what cannot be is left.
func TestBind(t *testing.T) {
	var was unix.CPUSet
	if err := unix.SchedGetaffinity(os.Getpid(), &was); err != nil {
		t.Fatal(err)
	}
	defer func() {
		all := []int{}
		for n := range 1024 {
			if was.IsSet(n) {
				all = append(all, n)
			}
		}
		tasks, _ := filepath.Glob("/proc/self/task/*")
		for _, dir := range tasks {
			var tid int
			for _, c := range filepath.Base(dir) {
				tid = 10*tid + int(c-'0')
			}
			_ = unix.SchedSetaffinity(tid, &was)
		}
		runtime.GOMAXPROCS(len(all))
	}()
	first := 0
	for !was.IsSet(first) {
		first++
	}
	if changed, err := gpus.Bind(nil); changed || err != nil {
		t.Error("no CPUs", changed, err)
	}
	if changed, err := gpus.Bind([]int{1023, 5000}); err != nil || changed && !was.IsSet(1023) {
		t.Error("CPUs that are not ours", changed, err)
	}
	stop := make(chan struct{})
	begun := make(chan struct{})
	for range 8 { // threads that are there before
		go func() {
			runtime.LockOSThread()
			begun <- struct{}{}
			<-stop
		}()
		<-begun
	}
	changed, err := gpus.Bind([]int{first, 5000})
	if err != nil || changed != (was.Count() > 1) {
		t.Fatal(changed, err)
	}
	for range 8 { // and after; none of them is unlocked, so new ones begin
		go func() {
			runtime.LockOSThread()
			begun <- struct{}{}
			<-stop
		}()
		<-begun
	}
	if by := threads(t); len(by) != 1 {
		t.Errorf("threads by the CPUs on which they may run: %v", by)
	}
	if again, err := gpus.Bind([]int{first}); again || err != nil {
		t.Error("a second time", again, err)
	}
	close(stop)
}
