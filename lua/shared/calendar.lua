-- When the day, the week and the month of `now` end, in UTC; the twin of algorithm/calendar.rs.
local function define_calendar()
  local DAY = 86400000000

  -- The day since 1970-01-01 on which a month begins.
  local function first_of_month(year, month)
    local shifted
    if month > 2 then shifted = month - 3 else year, shifted = year - 1, month + 9 end
    local era, year_of_era = math.floor(year / 400), year % 400
    local day_of_year = math.floor((153 * shifted + 2) / 5)
    local leap_days = math.floor(year_of_era / 4) - math.floor(year_of_era / 100)
    return era * 146097 + year_of_era * 365 + leap_days + day_of_year - 719468
  end

  local function month_end()
    local shifted = math.floor(now / DAY) + 719468
    local era, day_of_era = math.floor(shifted / 146097), shifted % 146097
    local year_of_era = math.floor((day_of_era - math.floor(day_of_era / 1460)
      + math.floor(day_of_era / 36524) - math.floor(day_of_era / 146096)) / 365)
    local leap_days = math.floor(year_of_era / 4) - math.floor(year_of_era / 100)
    local day_of_year = day_of_era - 365 * year_of_era - leap_days
    local shifted_month = math.floor((5 * day_of_year + 2) / 153)
    local year = year_of_era + era * 400
    -- Years run from March to February here.
    local month = shifted_month + 3
    if month > 12 then year, month = year + 1, month - 12 end
    if month == 12 then year, month = year + 1, 1 else month = month + 1 end
    return first_of_month(year, month) * DAY
  end

  -- The end of the window of `now`, by the code of its span.
  local window_end = {
    [0] = function(period) return now - now % period + period end,
    [1] = function(period) return now + period end,
    [2] = function() return now - now % DAY + DAY end,
    -- Weeks begin on Monday; 1970-01-01 was a Thursday, three days into its week.
    [3] = function() return (math.floor((math.floor(now / DAY) + 3) / 7) * 7 + 4) * DAY end,
    [4] = month_end,
  }
  return window_end
end
